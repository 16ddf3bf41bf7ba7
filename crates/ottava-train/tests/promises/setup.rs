//! Code that the families share: small models, seeded weights and data, and a plain training loop.

mod checkpoint;
mod training;

pub use checkpoint::{progress, save_checkpoint};
pub use training::Training;

use ottava_models::layers::{
    Block, BlockSaved, Branch, BranchSaved, Linear, LinearConfig, Norm, NormSaved, OperandCast, SavedOperand,
};
use ottava_models::{
    CacheSizes, ConfigFile, Decoder, DecoderConfig, InferenceBatch, KvCache, SequenceTokens, decoder_config,
};
use ottava_parallel::Partition;
use ottava_recipe::context::{Context, Sequences};
use ottava_recipe::layer_ranks::Undivided;
use ottava_recipe::mode::{Mode, StepPrecision};
use ottava_recipe::param::{
    Builder, FolderLayout, FolderTensor, Init, MemoryPolicy, Param, Purpose, Split, WeightSource,
};
use ottava_recipe::scaling::{CastLosses, OneRank, ScalingState};
use ottava_recipe::{
    Cast, Delayed, ExceptionsConfig, Fp8Format, Precision, PrecisionOverride, ProductName, Recipe, RecipeName, Scaling,
    WgradBlocks,
};
use ottava_tensor::comm::{Group, threads};
use ottava_tensor::ops::{CurrentScaling, cast, normal_from, real_type};
pub use ottava_tensor::testing::{dot, largest_error, relative_error};
use ottava_tensor::testing::{gpu, integers, values};
use ottava_tensor::{DType, Device, Tensor};
use ottava_train::step::{LossScale, MicroBatch, NextTokenLoss, Program, ProgramInputs};
use serde_json::{Value, json};
use std::io::Read;
use std::ops::Range;
use std::panic::resume_unwind;
use std::rc::Rc;
use std::sync::LazyLock;

/// Returns the CPU, and the GPU if there is one.
pub fn devices() -> Vec<Device> {
    std::iter::once(Device::Cpu).chain(gpu()).collect()
}

/// Returns whether to run all combinations of options instead of some of each kind: `just nightly combinations` and `ranks`.
pub fn all_combinations() -> bool {
    std::env::var("OTTAVA_COMBINATIONS").is_ok_and(|value| value == "full")
}

/// Returns the `options` of case `number`. With [`all_combinations`], these are all options. Otherwise, they are `count` options that rotate with the
/// number of the case.
pub fn rotated<T: Copy>(options: &[T], count: usize, number: usize) -> Vec<T> {
    let count = if all_combinations() { options.len() } else { count };
    (0..count).map(|i| options[(number * count + i) % options.len()]).collect()
}

/// Runs `work` in a pool of one thread, and returns its result. For ops on small tensors, waking other threads would take longer than the ops.
/// Results do not depend on the number of threads (`determinism`).
pub fn on_one_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a thread starts").install(work)
}

/// Runs `work` on each of `ranks` threads of one group, and returns its results in the order of ranks.
pub fn on_ranks<T: Send + 'static>(ranks: usize, work: impl Fn(Group) -> T + Clone + Send + 'static) -> Vec<T> {
    let start = |comm| {
        let work = work.clone();
        std::thread::spawn(move || on_one_thread(move || work(comm)))
    };
    let started: Vec<_> = threads::group(ranks).into_iter().map(start).collect();
    started.into_iter().map(|rank| rank.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
}

/// Returns the [`devices`] that support the products of `recipe`.
pub fn devices_of(recipe: &Recipe) -> Vec<Device> {
    devices().into_iter().filter(|device| recipe.expect_on(device).is_ok()).collect()
}

/// Returns the [`recipes`] whose products `device` supports.
pub fn recipes_on(device: &Device) -> Vec<(String, Recipe)> {
    recipes().into_iter().filter(|(_, recipe)| recipe.expect_on(device).is_ok()).collect()
}

/// Returns the recipe with a name and with the formats of its casts.
pub fn recipe(name: RecipeName, format: Fp8Format) -> Recipe {
    Precision {
        recipe: name,
        fp8_format: format,
        delayed: Delayed { amax_history_len: 4, ..Delayed::default() },
        ..Precision::default()
    }
    .recipe()
}

/// Returns recipes that leave some linears of a model with two blocks in BF16, so that every neighbour of a cast also occurs without a cast. Other
/// recipes leave single products, so that every operand occurs in both forms. Some have options that change casts.
pub fn mixed() -> Vec<(String, Recipe)> {
    use ProductName::{Dgrad, Fprop, Wgrad};
    let products = [
        (RecipeName::Fp8Delayed, vec![Wgrad]),
        (RecipeName::Fp8Current, vec![Fprop]),
        (RecipeName::Fp8Current, vec![Dgrad, Wgrad]),
        (RecipeName::Fp8Row, vec![Fprop, Dgrad]),
        (RecipeName::Fp8Block, vec![Dgrad]),
    ];
    let products = products.map(|(name, high)| {
        let words = format!("{} but {high:?}", name.as_str());
        let high_precision_products = high;
        (
            words,
            Precision {
                recipe: name,
                exceptions: ExceptionsConfig { high_precision_products, ..ExceptionsConfig::default() },
                delayed: Delayed { amax_history_len: 4, ..Delayed::default() },
                ..Precision::default()
            }
            .recipe(),
        )
    });
    let rounded = Precision { recipe: RecipeName::Fp8Block, power_of_two_scales: true, ..Precision::default() };
    let rounded = ("fp8-block in powers of two".to_string(), rounded.recipe());
    let along = Precision { recipe: RecipeName::Fp8Block, wgrad_blocks: WgradBlocks::Along, ..Precision::default() };
    let along = ("fp8-block, wgrad by 1x128".to_string(), along.recipe());
    let other = |layers: &str, recipe| PrecisionOverride {
        layers: vec![layers.into()],
        recipe: Some(recipe),
        fp8_format: None,
        high_precision_products: None,
    };
    let several = Precision {
        recipe: RecipeName::Fp8Delayed,
        delayed: Delayed { amax_history_len: 4, ..Delayed::default() },
        overrides: vec![
            other("*.down_proj", RecipeName::Fp8Block),
            other("*.0.self_attn", RecipeName::Fp8Row),
            other("*.1.self_attn.o_proj", RecipeName::Fp8Current),
        ],
        ..Precision::default()
    };
    let several = ("several recipes".to_string(), several.recipe());
    let smooth = [RecipeName::Fp8Delayed, RecipeName::Fp8Current].map(|recipe| {
        let precision = Precision {
            recipe,
            smooth_swiglu: true,
            delayed: Delayed { amax_history_len: 4, ..Delayed::default() },
            ..Precision::default()
        };
        (format!("{}, smooth", recipe.as_str()), precision.recipe())
    });
    let delayed = ["*.o_proj", "*.0.mlp.down_proj", "*.1.mlp.gate_proj", "*.1.mlp.up_proj"];
    let current = ["*.0.self_attn.qkv_proj", "*.0.mlp.gate_up_proj", "*.1.self_attn.o_proj", "*.1.mlp.down_proj"];
    [(RecipeName::Fp8Delayed, delayed), (RecipeName::Fp8Current, current)]
        .map(|(name, patterns)| {
            let mut recipe = recipe(name, Fp8Format::Hybrid);
            recipe.exceptions.patterns = patterns.map(String::from).to_vec();
            (format!("{} and bf16", name.as_str()), recipe)
        })
        .into_iter()
        .chain(products)
        .chain([rounded, along, several])
        .chain(smooth)
        .collect()
}

/// Returns every recipe that can be configured by name and format, and the mixed recipes, with descriptions for messages.
pub fn recipes() -> Vec<(String, Recipe)> {
    let formats = |name| match name {
        RecipeName::Fp32 | RecipeName::Bf16 | RecipeName::Fp16 => &[Fp8Format::Hybrid][..],
        RecipeName::Fp8Delayed | RecipeName::Fp8Current => &[Fp8Format::Hybrid, Fp8Format::E4m3][..],
        RecipeName::Fp8Row => &[Fp8Format::E4m3, Fp8Format::Hybrid][..],
        RecipeName::Fp8Block | RecipeName::Mxfp8 => &[Fp8Format::E4m3][..],
        RecipeName::Nvfp4 => &[Fp8Format::Auto][..],
    };
    let all = RecipeName::ALL.into_iter().flat_map(|name| formats(name).iter().map(move |&format| (name, format)));
    all.map(|(name, format)| match formats(name).len() {
        1 => (name.as_str().to_string(), recipe(name, format)),
        _ => (format!("{} {format:?}", name.as_str()), recipe(name, format)),
    })
    .chain(mixed())
    .collect()
}

/// Returns the names of recipes that cast and whose products `device` supports.
pub fn fp8_names_on(device: &Device) -> Vec<RecipeName> {
    let recipe = |name: &RecipeName| recipe(*name, Fp8Format::Auto);
    let casts = |name: &RecipeName| recipe(name).casts.is_some() && recipe(name).expect_on(device).is_ok();
    RecipeName::ALL.into_iter().filter(casts).collect()
}

/// Returns the names of [`fp8_names_on`] whose formats have eight bits. Tests with bounds for the errors of FP8 use them.
pub fn eight_bit_names_on(device: &Device) -> Vec<RecipeName> {
    fp8_names_on(device).into_iter().filter(|name| *name != RecipeName::Nvfp4).collect()
}

/// Returns the recipes of [`recipes_on`] that cast.
pub fn fp8_recipes_on(device: &Device) -> Vec<(String, Recipe)> {
    recipes_on(device).into_iter().filter(|(_, recipe)| recipe.casts.is_some()).collect()
}

/// Returns a faulty recipe, which tests must detect: current scaling, except that gradients are cast to `format` without a scale.
pub fn unscaled_gradients(format: DType) -> Recipe {
    let mut recipe = recipe(RecipeName::Fp8Current, Fp8Format::Hybrid);
    let casts = recipe.casts.as_mut().expect("it casts");
    // If the amax counts as the largest finite value, the scale is 1.
    let epsilon = format.max_finite().expect("an FP8 format");
    let scaling = Scaling::Current(CurrentScaling { epsilon, power_of_two: false });
    casts.grad_output = Cast { format, scaling, ..casts.grad_output };
    recipe
}

/// Returns a recipe with binary64 everywhere, for finite differences.
pub fn double() -> Recipe {
    Recipe { compute: DType::F64, ..recipe(RecipeName::Fp32, Fp8Format::Hybrid) }
}

/// Normal weights that depend on the tensors' names. Matrices have the standard deviation `std`. Weights of norms are near one and biases are near
/// zero, but never equal to these values, so that a value that is not read is noticed.
pub struct Seeded {
    pub std: f32,
}

impl WeightSource for Seeded {
    fn read(&mut self, tensor: &FolderTensor, elements: Range<usize>, init: Init) -> ottava_common::Result<Tensor> {
        let (mean, std) = match init {
            Init::Normal(_) | Init::Uniform(_) | Init::LogUniform(_) => (0.0, self.std),
            Init::Zeros => (0.0, 0.3),
            Init::Constant(value) => (value, 0.3),
            Init::Ones | Init::RowNorms { .. } => (1.0, 0.3),
        };
        let seed = tensor.name.bytes().fold(3u64, |h, b| h.wrapping_mul(1_099_511_628_211) ^ u64::from(b));
        let noise = normal_from(&Device::Cpu, &[elements.len()], std, seed, elements.start)?.to_vec::<f32>()?;
        let shifted: Vec<f32> = noise.iter().map(|x| mean + x).collect();
        Ok(Tensor::from_slice(&Device::Cpu, &[shifted.len()], &shifted)?)
    }
}

/// Loads seeded weights with standard deviation 0.5.
pub fn load(params: Vec<&mut Param>) {
    params.into_iter().for_each(|param| param.load_whole(&mut Seeded { std: 0.5 }).expect("weights are drawn"));
}

/// Builds one layer for training, and the scaling state of its casts.
pub fn build<L: Alone>(
    recipe: &Recipe,
    device: &Device,
    make: impl FnOnce(&mut Builder) -> ottava_common::Result<L>,
) -> (L, ScalingState) {
    let mut build = Builder::new(device, recipe, Purpose::Train(MemoryPolicy::FULL));
    let mut layer = make(&mut build).expect("the layer is built");
    load(layer.trained());
    (layer, ScalingState::new(device, build.slots, Rc::new(Undivided)).expect("the scaling state is built"))
}

/// Builds a linear of the stacked `parts` (name, rows).
pub fn linear(
    build: &mut Builder,
    parts: &[(&str, usize)],
    inputs: usize,
    bias: bool,
    std: f32,
) -> ottava_common::Result<Linear> {
    let parts: Vec<_> = parts.iter().map(|(name, rows)| (name.to_string(), *rows)).collect();
    let (name, parts, layout, split) = ("linear", &parts, FolderLayout::Same, Split::None);
    Linear::new(
        build,
        LinearConfig {
            name,
            parts,
            fused: &[],
            replicas: &[],
            inputs,
            bias,
            std,
            layout,
            split,
            shared_input: None,
            uncast: None,
        },
    )
}

/// Returns a model with these keys of `config.json`.
pub fn config(keys: Value) -> DecoderConfig {
    let Value::Object(keys) = keys else { panic!("config.json holds an object") };
    decoder_config(&ConfigFile::from_values("config.json", keys)).expect("the sizes are possible")
}

/// Returns a Llama with heads that share keys, large enough for FP8 errors to average out.
pub fn tiny_llama() -> DecoderConfig {
    tiny_llama_with(json!({}))
}

/// Returns [`tiny_llama`] with other `keys` of `config.json`.
pub fn tiny_llama_with(keys: Value) -> DecoderConfig {
    let mut all = json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 64, "intermediate_size": 112,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    });
    all.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    config(all)
}

/// Returns the model with seeded weights, ready for its first step.
pub fn decoder(config: &DecoderConfig, recipe: &Recipe, device: &Device, std: f32) -> Decoder {
    let mut decoder =
        Decoder::new(config, recipe, device, Purpose::Train(MemoryPolicy::FULL), 1000, &mut Seeded { std })
            .expect("it is built");
    decoder.quantize_weights().expect("its weights are cast");
    decoder
}

/// Returns the context of a pass over `sequences` that saves everything for backward.
pub fn training<'a>(scaling: &'a mut ScalingState, sequences: &'a Sequences, precision: StepPrecision) -> Context<'a> {
    Context::new(scaling.casts(Mode::training(precision)), &Undivided, sequences)
}

/// Returns `rows` sequences of equal length, with `tokens` tokens in all.
pub fn sequences(device: &Device, rows: usize, tokens: usize) -> Sequences {
    Sequences::new(device, rows, tokens / rows).expect("memory")
}

/// Returns the sequences of [`sequences`], whose tokens draw random numbers.
pub fn numbered(device: &Device, rows: usize, tokens: usize) -> Sequences {
    let mut sequences = sequences(device, rows, tokens);
    sequences.number_tokens(|row, position| (1000 * row + position) as i32).expect("memory");
    sequences.draws.as_mut().expect("it is numbered").set_seed(11).expect("memory");
    sequences
}

/// Returns a factor of the loss in the type that backward of `recipe` reads.
pub fn on_device(recipe: &Recipe, device: &Device, scale: f64) -> Tensor {
    let scale = Tensor::from_slice(&Device::Cpu, &[1], &[scale]).expect("one value");
    cast(&scale, real_type(recipe.compute)).and_then(|scale| scale.to_device(device)).expect("memory")
}

/// Computes losses without gradients.
pub fn losses(decoder: &mut Decoder, inputs: &Tensor, targets: &Tensor, rows: usize) -> ottava_common::Result<Tensor> {
    let sequences = sequences(decoder.device(), rows, inputs.len());
    let micro_batch =
        MicroBatch { inputs: inputs.clone(), targets: targets.clone(), sequences, loss: Box::new(NextTokenLoss) };
    run_solo(&Program::evaluation(), decoder, micro_batch, None)
}

/// Computes losses, and the gradients of `scale · Σ losses`, by the recipe.
pub fn losses_and_gradients(
    decoder: &mut Decoder,
    inputs: &Tensor,
    targets: &Tensor,
    rows: usize,
    scale: f64,
) -> ottava_common::Result<Tensor> {
    let sequences = sequences(decoder.device(), rows, inputs.len());
    losses_and_gradients_of(decoder, inputs, targets, sequences, scale)
}

/// Computes losses and gradients for tokens in the layout of `sequences`.
pub fn losses_and_gradients_of(
    decoder: &mut Decoder,
    inputs: &Tensor,
    targets: &Tensor,
    sequences: Sequences,
    scale: f64,
) -> ottava_common::Result<Tensor> {
    let [per_unit, per_micro_batch] =
        [scale, scale * targets.len() as f64].map(|factor| on_device(decoder.recipe(), decoder.device(), factor));
    let micro_batch =
        MicroBatch { inputs: inputs.clone(), targets: targets.clone(), sequences, loss: Box::new(NextTokenLoss) };
    run_solo(&Program::gradients(1), decoder, micro_batch, Some(&LossScale { per_unit, per_micro_batch }))
}

/// Returns one factor of all losses, for a model whose layers have no losses.
pub fn loss_scale(factor: Tensor) -> LossScale {
    LossScale { per_unit: factor.clone(), per_micro_batch: factor }
}

/// Computes losses of one micro-batch, with a program of one rank that runs by the recipe.
fn run_solo(
    program: &Program,
    decoder: &mut Decoder,
    micro_batch: MicroBatch,
    loss_scale: Option<&LossScale>,
) -> ottava_common::Result<Tensor> {
    let (micro_batches, partition) = (&[micro_batch], &Partition::solo());
    let inputs = ProgramInputs { micro_batches, loss_scale, precision: StepPrecision::Recipe, partition };
    Ok(program.run(decoder, &inputs, None)?.remove(0))
}

pub fn precision(high: bool) -> StepPrecision {
    if high { StepPrecision::High } else { StepPrecision::Recipe }
}

/// Returns a KV cache with room for `tokens` tokens of one sequence, and its blocks.
pub fn kv_cache(decoder: &Decoder, tokens: usize) -> (KvCache, Vec<Vec<i32>>) {
    const BLOCK_SIZE: usize = 16;
    let blocks = tokens.div_ceil(BLOCK_SIZE);
    let groups: Vec<_> = decoder.kv_groups(tokens).into_iter().map(|group| (group, blocks)).collect();
    let dtype = decoder.recipe().compute;
    let sizes = CacheSizes { groups: &groups, block_size: BLOCK_SIZE, dtype, slots: 1, saved: 0 };
    let cache = decoder.kv_cache(sizes).expect("memory");
    (cache, vec![(0..blocks as i32).collect(); groups.len()])
}

/// Returns the logits of the last `new` tokens of the sequence `tokens` in `cache`.
pub fn next_logits(
    decoder: &Decoder,
    (cache, blocks): &mut (KvCache, Vec<Vec<i32>>),
    tokens: &[u32],
    new: usize,
) -> Tensor {
    let start = tokens.len() - new;
    let tokens = [SequenceTokens::new(start, &tokens[start..], blocks)];
    let batch = InferenceBatch::padded(decoder.device(), &tokens).expect("memory");
    let hidden = decoder.hidden(&batch, cache).expect("forward runs");
    let rows: Vec<i32> = (0..new as i32).collect();
    decoder.logits(&hidden, &Tensor::from_slice(decoder.device(), &[new], &rows).expect("memory")).expect("logits")
}

/// Returns `prompt` and the most likely tokens after it, `tokens` in all. They come from the paged cache: the prompt is read in one pass, then token
/// by token.
pub fn greedy_text(decoder: &Decoder, prompt: &[u32], tokens: usize) -> Vec<u32> {
    let mut cache = kv_cache(decoder, tokens);
    let (mut text, mut new) = (prompt.to_vec(), prompt.len());
    while text.len() < tokens {
        let logits = values(&next_logits(decoder, &mut cache, &text, new));
        let last = &logits[logits.len() - decoder.config().vocabulary..];
        let best = (0..last.len()).max_by(|&a, &b| last[a].total_cmp(&last[b])).expect("a vocabulary");
        text.push(best as u32);
        new = 1;
    }
    text
}

/// Returns the logits of all tokens of one sequence.
pub fn logits(decoder: &Decoder, ids: &Tensor) -> Tensor {
    let ids: Vec<u32> = ids.to_vec::<i32>().expect("ids").into_iter().map(|id| id as u32).collect();
    next_logits(decoder, &mut kv_cache(decoder, ids.len()), &ids, ids.len())
}

/// Casts parameters for the next step.
pub fn quantize<'a>(params: impl IntoIterator<Item = &'a mut Param>, scaling: &mut ScalingState) {
    let mut casts = scaling.casts(Mode::TRAINING);
    params.into_iter().for_each(|param| param.quantize(&mut casts).expect("it is cast"));
}

/// A sublayer as a function of its input, with no other layer after a norm or in parallel.
pub trait Alone {
    type Saved;
    fn forward(&self, x: &Tensor, context: &mut Context) -> ottava_common::Result<(Tensor, Self::Saved)>;
    fn backward(&mut self, dy: Tensor, saved: Self::Saved, context: &mut Context) -> ottava_common::Result<Tensor>;
    fn trained(&mut self) -> Vec<&mut Param>;
}

impl Alone for Linear {
    type Saved = SavedOperand;

    fn forward(&self, x: &Tensor, context: &mut Context) -> ottava_common::Result<(Tensor, SavedOperand)> {
        Linear::forward(self, x.clone(), None, context)
    }

    fn backward(&mut self, dy: Tensor, saved: SavedOperand, context: &mut Context) -> ottava_common::Result<Tensor> {
        Linear::backward(self, dy, saved, context)
    }

    fn trained(&mut self) -> Vec<&mut Param> {
        let mut all = Vec::new();
        self.parameters_mut(&mut |param| all.push(param));
        all
    }
}

impl Alone for Branch {
    type Saved = BranchSaved;

    fn forward(&self, x: &Tensor, context: &mut Context) -> ottava_common::Result<(Tensor, BranchSaved)> {
        Branch::forward(self, x, x, context)
    }

    fn backward(&mut self, dy: Tensor, saved: BranchSaved, context: &mut Context) -> ottava_common::Result<Tensor> {
        Ok(Branch::backward(self, dy.clone().into(), &dy, saved, &OperandCast::NONE, context)?.value)
    }

    fn trained(&mut self) -> Vec<&mut Param> {
        let mut all = Vec::new();
        self.parameters_mut(&mut |param| all.push(param));
        all
    }
}

impl Alone for Block {
    type Saved = BlockSaved;

    fn forward(&self, x: &Tensor, context: &mut Context) -> ottava_common::Result<(Tensor, BlockSaved)> {
        Block::forward(self, x, context)
    }

    fn backward(&mut self, dy: Tensor, saved: BlockSaved, context: &mut Context) -> ottava_common::Result<Tensor> {
        Ok(Block::backward(self, dy.into(), saved, &OperandCast::NONE, context)?.value)
    }

    fn trained(&mut self) -> Vec<&mut Param> {
        let mut all = Vec::new();
        self.parameters_mut(&mut |param| all.push(param));
        all
    }
}

impl Alone for Norm {
    type Saved = NormSaved;

    fn forward(&self, x: &Tensor, context: &mut Context) -> ottava_common::Result<(Tensor, NormSaved)> {
        Norm::forward(self, x, context)
    }

    fn backward(&mut self, dy: Tensor, saved: NormSaved, _: &mut Context) -> ottava_common::Result<Tensor> {
        Norm::backward(self, &dy, saved)
    }

    fn trained(&mut self) -> Vec<&mut Param> {
        let mut all = Vec::new();
        self.parameters_mut(&mut |param| all.push(param));
        all
    }
}

/// Ends a step for scales and weights, as an update does. Returns the losses of its casts.
pub fn finish_step(decoder: &mut Decoder) -> CastLosses {
    decoder.scaling().update().expect("scales follow");
    let losses = decoder.scaling().losses(&OneRank).expect("counters");
    decoder.quantize_weights().expect("weights follow");
    losses
}

/// Returns English text to learn: the bundled definitions in an order without a pattern, as bytes below 128. The text is read once, since tests of
/// many models learn it.
pub fn text() -> &'static [i32] {
    static TEXT: LazyLock<Vec<i32>> = LazyLock::new(|| {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/wordnet-glosses.txt.gz");
        let file = std::fs::File::open(path).expect("the bundled text is there");
        let mut all = Vec::new();
        flate2::read::GzDecoder::new(file).read_to_end(&mut all).expect("it is whole");
        let lines: Vec<&[u8]> = all.split_inclusive(|&byte| byte == b'\n').collect();
        // Lines are in alphabetical order. A stride that shares no factor with their number visits each line once.
        let visited = (0..lines.len()).map(|i| lines[i * 60_013 % lines.len()]);
        visited.flatten().map(|&byte| i32::from(byte.min(127))).collect()
    });
    &TEXT
}

/// Returns a batch of `text` from byte `start` on.
pub fn text_batch(text: &[i32], start: usize, rows: usize, seq_len: usize) -> [Tensor; 2] {
    [0, 1].map(|shift| {
        let ids = &text[start + shift..][..rows * seq_len];
        Tensor::from_slice(&Device::Cpu, &[rows * seq_len], ids).expect("as many")
    })
}

/// Returns I32 inputs and targets, `[rows · seq_len]` each. A token determines the next token in seven of eight cases.
pub fn batch(name: &str, rows: usize, seq_len: usize, vocabulary: usize) -> [Tensor; 2] {
    let noise = integers(name, rows * (seq_len + 1), 8 * vocabulary).to_vec::<i32>().expect("integers");
    let (mut inputs, mut targets) = (Vec::new(), Vec::new());
    for noise in noise.chunks_exact(seq_len + 1) {
        let mut token = noise[0] as usize % vocabulary;
        for &noise in &noise[1..] {
            inputs.push(token as i32);
            token = if noise % 8 == 0 { noise as usize / 8 } else { (5 * token + 7) % vocabulary };
            targets.push(token as i32);
        }
    }
    [inputs, targets].map(|ids| Tensor::from_slice(&Device::Cpu, &[rows * seq_len], &ids).expect("as many"))
}

/// Returns the gradients of all parameters by name, as F64.
pub fn gradients(decoder: &mut Decoder) -> Vec<(String, Vec<f64>)> {
    let gradient = |p: &mut Param| {
        (p.identity.name().to_string(), values(&p.gradient.get().expect("a gradient").values().expect("readable")))
    };
    decoder.parameters().into_iter().map(gradient).collect()
}

pub fn mean(x: &Tensor) -> f64 {
    values(x).iter().sum::<f64>() / x.len() as f64
}
