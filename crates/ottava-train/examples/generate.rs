//! Completes several prompts together with a model.
//!
//! usage: cargo run --release --example generate -- [MODEL FOLDER] [PROMPT]...
//!
//! Without a folder, the model has random weights.

use ottava_checkpoint::{FolderWeights, RandomWeights};
use ottava_common::Result;
use ottava_data::Tokenizer;
use ottava_engine::{Engine, EngineOptions, Request, Sampling, TextRequest, complete};
use ottava_models::{ConfigFile, Decoder, decoder_config};
use ottava_recipe::layer_ranks::Undivided;
use ottava_recipe::param::WeightSource;
use ottava_recipe::{KvCacheDtype, Precision, RecipeName};
use ottava_tensor::Device;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// The maximum number of tokens of a prompt with its completion.
const MAX_LEN: usize = 128;

fn main() -> Result<()> {
    complete_prompts(std::env::args().skip(1))
}

fn complete_prompts(mut given: impl Iterator<Item = String>) -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folder = given.next().map(PathBuf::from);
    let mut prompts: Vec<String> = given.collect();
    if prompts.is_empty() {
        prompts = ["otter (noun):", "sing (verb):"].map(String::from).to_vec();
    }
    let (config, tokens) = match &folder {
        Some(folder) => (folder.clone(), folder.clone()),
        None => (root.join("configs/models/quickstart.json"), root.join("data/tokenizer")),
    };
    let (sizes, tokenizer) = (decoder_config(&ConfigFile::read(&config)?)?, Tokenizer::load(&tokens)?);
    let mut weights: Box<dyn WeightSource> = match &folder {
        Some(folder) => Box::new(FolderWeights::open(folder)?),
        None => Box::new(RandomWeights { seed: 1, device: Device::Cpu }),
    };

    // Products of the prompt and of each new token read FP8 codes, with one scale per row.
    let recipe = Precision { recipe: RecipeName::Fp8Row, ..Precision::default() }.recipe();
    let mut model = Decoder::for_inference(&sizes, &recipe, &Device::Cpu, MAX_LEN, &mut *weights, Rc::new(Undivided))?;
    model.quantize_weights()?;
    let lengths = prompts.iter().map(|_| MAX_LEN);
    let options = EngineOptions::for_lengths(&model, None, lengths, MAX_LEN, KvCacheDtype::Auto)?;
    let mut engine = Engine::new(model, &options)?;

    let requests = prompts.iter().enumerate().map(|(number, prompt)| {
        let sampling = Sampling { temperature: 0.8, seed: number as u64, ..Sampling::default() };
        let prompt = tokenizer.encode_prompt(prompt)?;
        Ok(TextRequest {
            request: Request { prompt, sampling, max_new_tokens: 16, ..Request::default() },
            ..TextRequest::default()
        })
    });
    let requests = requests.collect::<Result<Vec<_>>>()?;
    let mut ended = 0;
    complete(&mut engine, &tokenizer, requests, &mut |_, _| {}, &mut |number, completion| {
        println!("{}{} ({} tokens, {:?})", prompts[number], completion.text, completion.tokens, completion.reason);
        ended += 1;
        Ok(())
    })?;
    assert_eq!(ended, prompts.len(), "each prompt has a completion");
    Ok(())
}

#[test]
fn the_example_runs() {
    complete_prompts(std::iter::empty()).expect("it runs to its end");
}
