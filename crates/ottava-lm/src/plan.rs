//! What a run will do, said before it does it: casts with their reasons, counts, memory.

use crate::config::{MemoryConfig, RunConfig};
use crate::error::Result;
use crate::level::{Masters, States};
use crate::models::{DecoderConfig, LinearShape};
use crate::param::GradFormat;
use crate::recipe::{Cast, Casts, Decision, ProductPrecision, Recipe};
use crate::recompute::{Recompute, SavedActivations};
use ottava_tensor::ops::{Accumulation, AttentionBackend, real_type};
use ottava_tensor::{DType, Device, Granularity, QuantizedTensor};
use serde::Serialize;

/// The plan of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// Trained values.
    pub parameters: usize,
    /// Floating-point operations of forward and backward per token.
    pub flops_per_token: f64,
    /// Tokens of an optimizer step.
    pub tokens_per_step: u64,
    /// Each kind of linear.
    pub linears: Vec<LinearPlan>,
    /// What runs attention.
    pub attention: String,
    /// Bytes by use, largest possible at once.
    pub memory: Vec<MemoryLine>,
    /// Sum of the memory lines.
    pub memory_bytes: u64,
}

/// The decisions about one linear, or about the linears of that name in all blocks.
#[derive(Clone, Debug, Serialize)]
pub struct LinearPlan {
    /// Its name; `*` stands for the number of the block.
    pub name: String,
    /// How many there are.
    pub count: usize,
    /// Outputs and inputs.
    pub shape: [usize; 2],
    /// `y = x · Wᵀ`.
    pub fprop: String,
    /// `dx = dy · W`.
    pub dgrad: String,
    /// `dW = dyᵀ · x`.
    pub wgrad: String,
    /// Why.
    pub reason: String,
}

/// Memory of one use.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryLine {
    /// The use.
    pub what: String,
    /// Its bytes.
    pub bytes: u64,
}

impl Plan {
    /// The plan of `config` for a model of `sizes` on `device`.
    pub fn new(config: &RunConfig, sizes: &DecoderConfig, device: &Device) -> Result<Plan> {
        let recipe = config.recipe();
        let decisions = sizes.decide(&recipe)?;
        let kinds = sizes.block_linears();
        let mut linears: Vec<_> = kinds
            .iter()
            .enumerate()
            .flat_map(|(i, linear)| {
                let blocks: Vec<&Decision> = decisions.iter().map(|block| &block[i]).collect();
                linear_plans(linear, &blocks, recipe.compute)
            })
            .collect();
        let high = format!("{}, exact", recipe.compute);
        linears.push(LinearPlan {
            name: if sizes.tied { "model.embed_tokens (as head)".into() } else { "lm_head".into() },
            count: 1,
            shape: [sizes.vocabulary, sizes.channels],
            fprop: high.clone(),
            dgrad: high.clone(),
            wgrad: high,
            reason: "the head stays in high precision in every recipe".into(),
        });
        let attention = match AttentionBackend::choose(device, recipe.compute, sizes.head_dim) {
            AttentionBackend::Cpu => "the reference on the CPU".to_string(),
            AttentionBackend::CuDnn => "cuDNN, bfloat16".to_string(),
            AttentionBackend::Plain => format!(
                "plain kernels: cuDNN takes bfloat16 with heads of a multiple of 8 up to 128, these are {} of {}",
                recipe.compute, sizes.head_dim
            ),
        };
        let memory = memory(config, sizes, &recipe, &decisions, device);
        Ok(Plan {
            parameters: sizes.parameters(),
            flops_per_token: sizes.flops_per_token(config.data.max_length),
            tokens_per_step: config.tokens_per_step(),
            linears,
            attention,
            memory_bytes: memory.iter().map(|line| line.bytes).sum(),
            memory,
        })
    }
}

/// A line for each decision there is about the linears of one name.
fn linear_plans(linear: &LinearShape, blocks: &[&Decision], compute: DType) -> Vec<LinearPlan> {
    let mut groups: Vec<(&Decision, Vec<usize>)> = Vec::new();
    for (block, &decision) in blocks.iter().enumerate() {
        match groups.iter_mut().find(|(other, _)| *other == decision) {
            Some((_, members)) => members.push(block),
            None => groups.push((decision, vec![block])),
        }
    }
    let plan = |(decision, members): (&Decision, Vec<usize>)| {
        let [fprop, dgrad, wgrad] = match &decision.fp8 {
            Some((Casts { input, weight, grad_output }, how)) => {
                let product = |a: &str, x: &Cast, b: &str, y: &Cast, how: ProductPrecision| {
                    let sums = match how {
                        ProductPrecision::High => return format!("{compute}, exact sums"),
                        ProductPrecision::Fp8(Accumulation::Fast) => "fast sums",
                        ProductPrecision::Fp8(Accumulation::Exact) => "exact sums",
                    };
                    format!("{a} {} · {b} {}, {sums}", operand(x), operand(y))
                };
                [
                    product("x", input, "W", weight, how.fprop),
                    product("dy", grad_output, "W", weight, how.dgrad),
                    product("dy", grad_output, "x", input, how.wgrad),
                ]
            }
            None => [(); 3].map(|()| format!("{compute}, exact sums")),
        };
        let LinearShape { name, n, k, .. } = *linear;
        let count = members.len();
        let which = if count == blocks.len() { "*".to_string() } else { ranges(&members) };
        let name = format!("model.layers.{which}.{name}");
        LinearPlan { name, count, shape: [n, k], fprop, dgrad, wgrad, reason: decision.reason.clone() }
    };
    groups.into_iter().map(plan).collect()
}

/// Ascending numbers in short: `3`, or `{0-2,7}`.
fn ranges(numbers: &[usize]) -> String {
    let runs = numbers.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [one] => one.to_string(),
        run => format!("{}-{}", run[0], run[run.len() - 1]),
    });
    let runs = runs.collect::<Vec<_>>().join(",");
    if numbers.len() == 1 { runs } else { format!("{{{runs}}}") }
}

/// A cast in short: its format, and what shares a scale where that is less than the tensor.
fn operand(cast: &Cast) -> String {
    let format = if cast.format == DType::E4M3 { "E4M3" } else { "E5M2" };
    match cast.granularity {
        Granularity::PerTensor => format.to_string(),
        granularity => format!("{format} {granularity}"),
    }
}

fn memory(
    config: &RunConfig,
    c: &DecoderConfig,
    recipe: &Recipe,
    decisions: &[[Decision; 4]],
    device: &Device,
) -> Vec<MemoryLine> {
    let size = recipe.compute.size();
    let parameters = c.parameters();
    let tokens = config.training.per_device_train_batch_size * config.data.max_length;
    let mut lines = Vec::new();
    let mut line = |what: &str, bytes: usize| {
        if bytes > 0 {
            lines.push(MemoryLine { what: what.into(), bytes: bytes as u64 });
        }
    };
    line(&format!("weights, {}", recipe.compute), parameters * size);
    let formats = config.optimizer.formats();
    let masters = match formats.masters {
        Masters::Float16 | Masters::Remainder => 2,
        Masters::Float32 if recipe.compute != DType::F32 => 4,
        Masters::Float32 | Masters::None => 0,
    };
    line("master weights", parameters * masters);
    let moments = match formats.states {
        States::Float32 => 8.0,
        States::Bfloat16 => 4.0,
        States::Float8 => 3.0,
        States::Coat => 2.0 + 24.0 / 128.0,
    };
    line("Adam moments", (parameters as f64 * moments) as usize);
    let pad = QuantizedTensor::padded;
    let codes = |l: &LinearShape| pad(l.n) * pad(l.k);
    let cast = decisions.iter().flat_map(|block| block.iter().zip(c.block_linears()));
    let cast: Vec<(&Decision, LinearShape)> = cast.filter(|(decision, _)| decision.fp8.is_some()).collect();
    match config.memory.weight_codes.unwrap_or(config.optimizer.level.weight_codes()) {
        true => {
            let kept = cast.iter().filter(|(decision, _)| !decision.smooth);
            line("FP8 codes of weights, with transposes", kept.map(|(_, l)| 2 * codes(l)).sum());
        }
        false => line("FP8 codes of the weight at hand", cast.iter().map(|(_, l)| codes(l)).max().unwrap_or(0)),
    }
    let smooth = cast.iter().filter(|(decision, _)| decision.smooth);
    // More than the weight and its codes while they have the scales.
    line(
        "gradient of a smooth weight before its scales, float32",
        smooth.map(|(_, l)| l.n * l.k * 4).max().unwrap_or(0),
    );

    let saved = activations(c, recipe, decisions, &config.memory) * tokens;
    line(&format!("saved activations of one micro-batch, recompute {}", config.memory.recompute.as_str()), saved);
    let matrices = c.layers * c.block_linears().iter().map(|l| l.n * l.k).sum::<usize>();
    let dtype = GradFormat::of(formats.gradients, recipe.compute).dtype();
    let gradients = matrices * dtype.size() + (parameters - matrices) * 4;
    if config.training.gradient_accumulation_steps > 1 {
        line(&format!("gradients, {dtype}, of one micro-batch while the next runs"), gradients);
    } else {
        // Backward frees the activations of a block before it makes the gradients of the next.
        line(&format!("gradients, {dtype}, beyond what activations leave"), gradients.saturating_sub(saved));
    }
    let chunk = tokens.min(2048);
    line(
        "logits of a chunk of tokens, and the gradients around the head",
        chunk * c.vocabulary * size + 4 * tokens * c.channels * size + c.vocabulary * c.channels * 4,
    );
    let qkv = (c.heads + 2 * c.kv_heads) * c.head_dim;
    let largest = (4 * c.hidden * size + if cast.is_empty() { 0 } else { 4 * c.hidden }).max(2 * qkv * size);
    line("temporaries of backward", tokens * largest);
    if matches!(device, Device::Cuda(_)) {
        line("workspace of cuBLASLt", 32 << 20);
    }
    lines
}

/// Bytes that forward keeps for backward, per token.
fn activations(c: &DecoderConfig, recipe: &Recipe, decisions: &[[Decision; 4]], memory: &MemoryConfig) -> usize {
    let size = recipe.compute.size();
    let q = c.heads * c.head_dim;
    let qkv = q + 2 * c.kv_heads * c.head_dim;
    let block = |decisions: &[Decision; 4], recompute: Recompute| {
        // Inputs of both norms, attention's output, gate and up; then Q, K and V, and what the linears keep of their inputs.
        let read = match memory.saved_activations {
            SavedActivations::Float8 if memory.recompute != Recompute::Full => {
                2 * (c.channels + c.channels.div_ceil(16)) + 2 * c.hidden + (2 * c.hidden).div_ceil(16)
            }
            _ => (2 * c.channels + 2 * c.hidden) * size,
        };
        let mut bytes = read + q * size + (2 + c.heads) * real_type(recipe.compute).size();
        if !recompute.qkv() {
            bytes += qkv * size;
        }
        if !recompute.operands() {
            // The attention's output is the very tensor that an output projection without a cast keeps.
            let plain = [c.channels * size, 0, c.channels * size, c.hidden * size];
            // SwiGLU's backward makes the codes of the last one again.
            let codes = [c.channels, q, c.channels, 0];
            let kept = decisions.iter().zip(plain.into_iter().zip(codes));
            bytes += kept.map(|(d, (plain, codes))| if d.fp8.is_some() { codes } else { plain }).sum::<usize>();
        }
        bytes
    };
    let blocks = |recompute| decisions.iter().map(move |decisions| block(decisions, recompute));
    match memory.recompute {
        Recompute::Full => c.layers * c.channels * size + blocks(Recompute::None).max().unwrap_or(0),
        policy => blocks(policy).sum(),
    }
}
