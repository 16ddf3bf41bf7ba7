//! `ottava bench`: one file per benchmark.

mod attention;
mod comm;
mod decode;
mod gemm;
mod kernels;
mod linear;
mod messages;
mod rollouts;
mod serve;
mod shared;
mod train;

use attention::Attention;
use clap::{Args, Subcommand};
use comm::CommArgs;
use decode::Decode;
use gemm::Gemm;
use kernels::Kernels;
use linear::Linear;
use ottava_common::Result;
use rollouts::Rollouts;
use serve::Serve;
use train::Train;

/// Measure this machine: kernels relative to the memory bandwidth, collectives, and whole training steps.
#[derive(Args)]
#[command(after_help = "Examples:
  ottava bench kernels
  ottava bench gemm --model llama-2-7b --tokens 8192
  ottava bench linear --recipes bf16,fp8-delayed,fp8-current
  ottava bench linear --sweep --recipes fp8-delayed
  ottava bench attention --seq-lens 1024,4096 --power
  ottava bench train --model llama-2-7b --recipes bf16,fp8-delayed,fp8-current --storages bfloat16
  ottava bench train --recipes bf16,fp8-current --set first_layers_bf16=1 --set last_layers_bf16=1
  ottava bench train --model qwen2.5-0.5b --max-length 1024 --micro-batch 32 --json
  ottava bench train --model llama-3-8b --gpus 2
  ottava bench decode --model llama-3-8b --batch 1,16 --kv-cache-dtype auto,fp8 --prefill 8192
  ottava bench decode --model llama-3-70b --gpus 2 --recipes fp8-row --kv-cache-dtype fp8
  ottava bench rollouts --model llama-3-8b --recipes bf16,fp8-row --prompts 64
  ottava bench serve --num-prompts 256 --max-concurrency 64
  ottava bench comm --gpus 2
  ottava bench comm --ranks 4 --hosts 2 --device cpu")]
pub struct Bench {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    Kernels(Kernels),
    Gemm(Gemm),
    Linear(Linear),
    Attention(Attention),
    Train(Train),
    Decode(Decode),
    Rollouts(Rollouts),
    Serve(Serve),
    Comm(CommArgs),
}

impl Bench {
    pub fn run(self) -> Result<()> {
        match self.what {
            What::Kernels(command) => command.run(),
            What::Gemm(command) => command.run(),
            What::Linear(command) => command.run(),
            What::Attention(command) => command.run(),
            What::Train(command) => command.run(),
            What::Decode(command) => command.run(),
            What::Rollouts(command) => command.run(),
            What::Serve(command) => command.run(),
            What::Comm(command) => command.run(),
        }
    }
}
