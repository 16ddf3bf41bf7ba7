//! Times the products of the known models on this GPU, and writes the chosen algorithms to a file in the folder of `OTTAVA_CACHE_DIR`. If this file
//! is copied to crates/ottava-tensor/src/cuda/cublaslt/measured and named in choices.rs, users of this GPU and library need no timing. Products
//! depend on tokens and not on the number of blocks, so one block of each model is enough.
//!
//! usage: OTTAVA_CACHE_DIR=FOLDER measure_products [MODEL]...

use ottava_engine::{Engine, EngineOptions};
use ottava_parallel::Ranks;
use ottava_recipe::storage::Storage;
use ottava_recipe::{KvCacheDtype, Precision, RecipeName};
use ottava_settings::RunConfig;
use ottava_tensor::Device;
use ottava_train::bench::{TrainBench, model, random_decoder};
use std::rc::Rc;
use std::time::Instant;

const RECIPES: [RecipeName; 5] =
    [RecipeName::Bf16, RecipeName::Fp8Delayed, RecipeName::Fp8Current, RecipeName::Fp8Row, RecipeName::Fp8Block];
/// The recipes of inference. Folders of FP8 weights with their own scales need no further recipe.
const SERVED: [RecipeName; 2] = [RecipeName::Bf16, RecipeName::Fp8Row];
/// The storages that differ in the type in which gradients of weights are summed.
const STORAGES: [Storage; 2] = [Storage::Float32, Storage::Bfloat16];
/// The maximum batch of `ottava serve`. `MAX_LEN` is the maximum length of a request.
const AT_ONCE: usize = 256;
const MAX_LEN: usize = 4096;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let given: Vec<String> = std::env::args().skip(1).collect();
    let names = if given.is_empty() { vec!["llama-2-7b".to_string(), "llama-3-8b".into()] } else { given };
    let device = Device::cuda(0)?;
    for name in &names {
        for recipe in RECIPES {
            for storage in STORAGES {
                let begin = Instant::now();
                train(name, recipe, storage, &device)?;
                println!("{name}: training in {} at {storage:?}, {:.1?}", recipe.as_str(), begin.elapsed());
            }
        }
    }
    for name in &names {
        for recipe in SERVED {
            let begin = Instant::now();
            serve(name, recipe, &device)?;
            println!("{name}: serving in {}, {:.1?}", recipe.as_str(), begin.elapsed());
        }
    }
    Ok(())
}

/// Trains with two micro-batches. The second adds to the gradients of the first.
fn train(name: &str, recipe: RecipeName, storage: Storage, device: &Device) -> ottava_common::Result<()> {
    let bench = TrainBench {
        model: name.to_string(),
        layers: Some(1),
        seq_len: 4096,
        document_len: None,
        micro_batch: 2,
        micro_batches: 2,
        steps: 1,
        config: RunConfig::default(),
    };
    bench.run(recipe, storage, device, &Rc::new(Ranks::solo()))?;
    Ok(())
}

/// Runs the warm-up of an engine before its first request.
fn serve(name: &str, recipe: RecipeName, device: &Device) -> ottava_common::Result<()> {
    let sizes = model(name)?.with_layers(1);
    let precision = Precision { recipe, ..Precision::default() }.recipe();
    let model = random_decoder(&sizes, &precision, device, MAX_LEN, &Rc::new(Ranks::solo()))?;
    let lengths = std::iter::repeat_n(MAX_LEN, AT_ONCE);
    let options = EngineOptions::for_lengths(&model, None, lengths, MAX_LEN, KvCacheDtype::Auto)?;
    Engine::new(model, &options)?.warm_up()
}
