//! `ottava serve`.

use super::decoding::Decoding;
use super::inference::{Inference, InferenceRanks};
use super::lora_modules::{LoraModule, open_adapters};
use super::newest::with_model;
use super::sampling_flags::GenerationConfig;
use crate::output::{forward_signals, stop_on_signals};
use crate::ranks::{RankArgs, Role};
use clap::Args;
use ottava_checkpoint::{POOLING_FILE, Texts};
use ottava_common::{Error, Result};
use ottava_data::{ChatTemplate, Clock, Tokenizer};
use ottava_engine::{Engine, EngineOptions, LogprobsMode, Pooling, Sampling};
use ottava_models::{Adapters, ConfigFile, Decoder, Labels, classifier as classifier_file, pad_token};
use ottava_recipe::KvCacheDtype;
use ottava_serve::{
    Activation, Classifier, Model, NamedAdapter, OpenAdapters, Options, Origin, ReasoningParser, ToolCallParser, serve,
};
use ottava_settings::{DeviceChoice, ProblemType};
use ottava_tensor::Device;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

/// Serve a model over HTTP with OpenAI's and Anthropic's APIs.
#[derive(Args)]
#[command(after_help = "Examples:
  ottava serve runs/chat
  ottava serve model/ --recipe fp8-row --kv-cache-dtype fp8 --max-length 8192
  ottava serve model/ --gpus 2
  ottava serve model/ --lora-modules sql=adapters/sql chat=runs/chat
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{\"prompt\": \"otter (noun):\", \"max_tokens\": 20}'

Paths: /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages, /v1/embeddings, /v1/classify, /v1/rerank, /v1/score, /inference/v1/generate, /v1/models, /tokenize, /detokenize, /version, /health and /metrics (Prometheus). docs/serving.md has the fields.")]
pub struct Serve {
    /// A Hugging Face model folder (such as a checkpoint), or the folder of a run (its newest checkpoint is used).
    model: PathBuf,
    /// The address to listen on. An address other than the default may let other machines connect: then also set --api-key.
    #[arg(long, default_value = "127.0.0.1")]
    host: IpAddr,
    /// The port to listen on; 0 takes a free port.
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// The names of the model for clients; by default, MODEL as it is written on the command line. Answers have the name that the request has, or the
    /// first name. Several names may follow the flag, so name MODEL before it.
    #[arg(long, value_name = "NAME", num_args = 1..)]
    served_model_name: Vec<String>,
    /// A file with a chat template (Jinja) that replaces the template of the folder.
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,
    /// LoRA adapters that requests choose by name: a request whose `model` is NAME uses the adapter in FOLDER. FOLDER is a PEFT folder, or
    /// the folder of a run that trained an adapter (its newest checkpoint is used). Several adapters may follow the flag, so name MODEL
    /// before it.
    #[arg(long, value_name = "NAME=FOLDER", num_args = 1.., conflicts_with = "adapter")]
    lora_modules: Vec<LoraModule>,
    /// Let requests load and unload adapters: POST /v1/load_lora_adapter and /v1/unload_lora_adapter. A request names a folder on this machine, so set
    /// --api-key too.
    #[arg(long, conflicts_with = "adapter")]
    allow_runtime_lora_updating: bool,
    /// The key that clients must send.
    #[arg(long, env = "OTTAVA_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// A site whose pages may send requests from browsers and read the answers, such as `https://chat.example.org`; `*` for all sites. The option may
    /// be given several times.
    #[arg(long, value_name = "ORIGIN")]
    allowed_origin: Vec<Origin>,
    /// The default sampling settings of requests: auto reads them from generation_config.json in the folder of the model, none ignores this
    /// file.
    #[arg(long, value_enum, default_value = "auto")]
    generation_config: GenerationConfig,
    /// The format in which the model writes tool calls, such as hermes (also Qwen), qwen3_coder, glm45, llama3_json, mistral, deepseek_v3, kimi_k2 or
    /// openai (gpt-oss); by default, the format in the chat template. If neither this option nor the template names a format, calls stay in the text of
    /// answers.
    #[arg(long, value_name = "NAME")]
    tool_call_parser: Option<ToolCallParser>,
    /// How the model marks its reasoning: think (Qwen3, DeepSeek, GLM and others), gpt_oss, mistral or seed_oss; by default, the marks in the chat
    /// template. If neither this option nor the template names marks, reasoning stays in the text of answers.
    #[arg(long, value_name = "NAME")]
    reasoning_parser: Option<ReasoningParser>,
    /// Refuse fields of requests that are unknown or have no effect. By default, they are ignored, and the log names each of them once.
    #[arg(long)]
    strict: bool,
    /// How /v1/embeddings turns the activations of a text into one vector: last (the activations of the last token) or mean (of all tokens); by default
    /// as 1_Pooling/config.json of the folder of the adapter or of the model says, and last without this file.
    #[arg(long)]
    pooling: Option<Pooling>,
    /// The maximum number of tokens of prompt and completion together; by default the model's positions.
    #[arg(long, alias = "max-model-len", value_parser = super::count)]
    max_length: Option<usize>,
    /// The maximum number of completions in a batch; by default 256 on a GPU and 8 on a CPU, or fewer if recurrent states of a model take much memory.
    #[arg(long, value_parser = super::count)]
    max_num_seqs: Option<usize>,
    /// The maximum number of running and waiting requests; more requests are refused with status 429.
    #[arg(long, default_value_t = 1024, value_parser = super::count)]
    max_queue: usize,
    /// The size of the KV cache in tokens; by default the tokens of all completions at their maximum length, as far as memory allows. If this size is
    /// less than --max-length, it also limits the tokens of a request.
    #[arg(long, value_parser = super::count)]
    kv_cache_tokens: Option<usize>,
    /// The maximum number of tokens in a step; longer prompts are prefilled in several steps.
    #[arg(long, value_parser = super::count)]
    max_num_batched_tokens: Option<usize>,
    /// The type of cached keys and values: auto (the model's type), bfloat16 or fp8.
    #[arg(long, default_value = "auto")]
    kv_cache_dtype: KvCacheDtype,
    /// The distribution of the reported log-probabilities of drawn tokens: raw_logprobs (of the model) or processed_logprobs (of the distribution that
    /// tokens are drawn from, after penalties, temperature and truncation).
    #[arg(long, default_value = "raw_logprobs", value_name = "MODE")]
    logprobs_mode: LogprobsMode,
    /// Compute each prompt from its first token. By default, requests that begin with the same tokens share the keys and values of these tokens.
    #[arg(long)]
    no_enable_prefix_caching: bool,
    /// The seconds that a client may take to send its next request, to send a body, or to read any part of an answer.
    #[arg(long, default_value_t = 75, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    client_timeout: u64,
    /// The seconds that running requests have to finish after a signal to stop.
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    shutdown_timeout: u64,
    #[command(flatten)]
    decoding: Decoding,
    #[command(flatten)]
    how: Inference,
    #[command(flatten)]
    ranks: RankArgs,
}

/// The default maximum numbers of completions in a batch. On a CPU, larger batches are hardly faster.
const ON_A_CPU: usize = 8;
const ON_A_GPU: usize = 256;
/// The maximum number of connections.
pub const MAX_CONNECTIONS: usize = 4096;

impl Serve {
    pub fn run(self) -> Result<()> {
        if self.api_key.as_ref().is_some_and(String::is_empty) {
            return Err(Error::Config("the API key is empty; give one, or leave it out".into()));
        }
        LoraModule::expect_distinct(&self.lora_modules, &self.names())?;
        let (role, device) = self.how.role(&self.ranks)?;
        if !role.leads() {
            return self.follow(role, device);
        }
        if !self.host.is_loopback() && self.api_key.is_none() {
            tracing::warn!("{} can be reached from other machines, and there is no --api-key", self.host);
        }
        let options = Options {
            address: SocketAddr::new(self.host, self.port),
            names: self.names(),
            max_requests: self.max_queue,
            max_connections: MAX_CONNECTIONS,
            client_timeout: Duration::from_secs(self.client_timeout),
            api_key: self.api_key.clone(),
            shutdown_timeout: Duration::from_secs(self.shutdown_timeout),
            allowed_origins: self.allowed_origin.clone(),
            strict: self.strict,
        };
        stop_on_signals("stopping: running requests are completed, new ones are refused")?;
        let name = options.names[0].clone();
        let (started, processes) = channel();
        let load = move || {
            let ranks = InferenceRanks::join(role, device)?;
            let (engine, model) = self.load(&ranks)?;
            let engine = ranks.lead(engine)?.expect("this is rank 0");
            let _ = started.send(ranks.into_processes());
            Ok((engine, model))
        };
        serve(&options, load, |address| note!("serving {name} at http://{address}"))?;
        processes.iter().try_for_each(|processes| processes.wait())
    }

    /// Runs a rank other than 0. It computes the same steps as rank 0 and has no clients.
    fn follow(&self, role: Role, device: DeviceChoice) -> Result<()> {
        forward_signals()?;
        let ranks = InferenceRanks::join(role, device)?;
        let (engine, _) = self.load(&ranks)?;
        ranks.lead(engine).map(drop)
    }

    /// Returns the number of completions in a batch, at most `wanted`. The states of a recurrent `model` are in slots that are allocated
    /// at the start, and the caches have slots for `fitting` completions.
    ///
    /// Errors if `--max-num-seqs` asks for more slots.
    fn batch(&self, model: &Decoder, wanted: usize, fitting: usize) -> Result<usize> {
        match self.max_num_seqs {
            _ if model.state_bytes() == 0 => Ok(wanted),
            Some(most) if most > fitting => Err(Error::Memory(format!(
                "--max-num-seqs is {most}; at most {fitting} completions of this model, whose recurrent states take {} KiB each, are computed at once \
                 here",
                model.state_bytes() >> 10
            ))),
            _ => Ok(wanted.min(fitting)),
        }
    }

    /// Returns the names of the model for clients.
    fn names(&self) -> Vec<String> {
        match &self.served_model_name[..] {
            [] => vec![self.model.display().to_string()],
            names => names.to_vec(),
        }
    }

    /// Loads the model and warms up the engine of this rank. Also returns the properties of the model that requests need.
    fn load(&self, ranks: &InferenceRanks) -> Result<(Engine, Model)> {
        ranks.forward_signals();
        if self.allow_runtime_lora_updating {
            ranks.expect_alone("--allow-runtime-lora-updating")?;
        }
        self.decoding.check(ranks)?;
        let loaded = with_model(&self.model, |folder| {
            let config = ConfigFile::read(folder)?;
            let sizes = self.how.sizes(&config)?;
            let Texts { tokenizer, template } = self.how.texts(folder, &sizes)?;
            let template = ChatTemplate::load(&template, self.chat_template.as_deref(), Clock::Now)?;
            tokenizer.check_fits(sizes.vocabulary)?;
            let most = sizes.context();
            let max_model_len = self.max_length.unwrap_or(most);
            if max_model_len > most {
                let text = format!("--max-length is {max_model_len}, and {}", sizes.context_reason());
                return Err(Error::Config(text));
            }
            let sampling = self.generation_config.suggested(folder)?.unwrap_or_else(Sampling::unchanged);
            let of_template = || template.as_ref().and_then(ToolCallParser::of_template);
            let tool_call_parser = self.tool_call_parser.or_else(of_template);
            if let Some(parser) = tool_call_parser {
                tracing::info!("calls of tools are parsed as {}", parser.name());
            }
            let of_template = || template.as_ref().and_then(ReasoningParser::of_template);
            let reasoning_parser = self.reasoning_parser.or_else(of_template);
            if let Some(parser) = reasoning_parser {
                tracing::info!("reasoning is marked as {}", parser.name());
            }
            let classifier = match self.how.classifier_labels(&config)? {
                Some(labels) => Some(classifier(&config, &tokenizer, labels)?),
                None => None,
            };
            let pooling = match self.pooling {
                Some(pooling) => pooling,
                None => self.how.find(folder, pooling_of)?.unwrap_or(Pooling::default_for(sizes.is_encoder())),
            };
            expect_pooling(pooling, sizes.is_encoder())?;
            let vocabulary = sizes.vocabulary;
            let (root, adapters) = (self.model.display().to_string(), Vec::new());
            let model = Model {
                root,
                adapters,
                open_adapters: self.allow_runtime_lora_updating.then(|| Arc::new(open_adapters) as OpenAdapters),
                tokenizer,
                template,
                tool_call_parser,
                reasoning_parser,
                vocabulary,
                channels: sizes.stream.channels,
                pooling,
                is_encoder: sizes.is_encoder(),
                classifier,
                max_model_len,
                sampling,
            };
            let loaded = match &self.lora_modules[..] {
                [] if !self.allow_runtime_lora_updating => {
                    (self.how.load_any(folder, &config, max_model_len, ranks)?, Vec::new())
                }
                modules => self.how.load_beside(folder, &config, max_model_len, ranks, modules)?,
            };
            let draft = self.decoding.draft(&self.how, &model.tokenizer, max_model_len, ranks)?;
            Ok((loaded, draft, folder.to_path_buf(), model))
        });
        let ((decoder, adapters), draft, folder, mut model) = ranks.together(loaded)?;
        let default = if matches!(decoder.device(), Device::Cuda(_)) { ON_A_GPU } else { ON_A_CPU };
        let (at_once, max_model_len) = (self.max_num_seqs.unwrap_or(default), model.max_model_len);
        let lengths = std::iter::repeat_n(max_model_len, at_once);
        let mut options =
            EngineOptions::for_lengths(&decoder, draft.as_ref(), lengths, max_model_len, self.kv_cache_dtype)?;
        options.max_batch = self.batch(&decoder, at_once, options.max_batch)?;
        options.kv_cache_tokens = self.kv_cache_tokens.unwrap_or(options.kv_cache_tokens);
        options.prefill_chunk = self.max_num_batched_tokens.unwrap_or(options.prefill_chunk);
        options.prefix_caching = !self.no_enable_prefix_caching;
        options.logprobs_mode = self.logprobs_mode;
        let mut engine = self.decoding.engine(ranks, (decoder, draft), &folder, options)?;
        let named = |(module, adapters): (&LoraModule, Adapters)| NamedAdapter {
            name: module.name.clone(),
            root: module.folder.display().to_string(),
            id: engine.add_adapters(adapters),
        };
        model.adapters = self.lora_modules.iter().zip(adapters).map(named).collect();
        let kv_cache_tokens = engine.options().kv_cache_tokens;
        tracing::info!("{at_once} completions at once; the KV cache has room for {kv_cache_tokens} tokens");
        if engine.max_model_len() < max_model_len {
            model.max_model_len = engine.max_model_len();
            let len = model.max_model_len;
            tracing::warn!("the KV cache has room for {len} tokens: a request has {len} at most, not {max_model_len}");
        }
        engine.warm_up()?;
        Ok((engine, model))
    }
}

/// Errors with [`Error::Config`] if the model does not have the pooling.
fn expect_pooling(pooling: Pooling, is_encoder: bool) -> Result<()> {
    if pooling == Pooling::Cls && !is_encoder {
        return Err(Error::Config(
            "the pooling of embeddings is cls, and the first token of this model sees no other token; choose `--pooling mean` or `--pooling last`"
                .into(),
        ));
    }
    Ok(())
}

/// Returns the pooling that sentence-transformers reads from `folder`, or `None` without its file.
///
/// Errors with [`Error::Model`] for another pooling.
fn pooling_of(folder: &Path) -> Result<Option<Pooling>> {
    let path = folder.join(POOLING_FILE);
    if !path.is_file() {
        return Ok(None);
    }
    let file = ConfigFile::read(&path)?;
    let mode = |key: &str| file.optional(key, false);
    let modes = [mode("pooling_mode_mean_tokens")?, mode("pooling_mode_lasttoken")?, mode("pooling_mode_cls_token")?];
    match modes {
        [true, false, false] => Ok(Some(Pooling::Mean)),
        [false, true, false] => Ok(Some(Pooling::Last)),
        [false, false, true] => Ok(Some(Pooling::Cls)),
        _ => Err(file.error(
            "not exactly one of `pooling_mode_mean_tokens`, `pooling_mode_lasttoken` and `pooling_mode_cls_token` is true; the poolings mean, last and \
             cls are implemented, and `--pooling` chooses one",
        )),
    }
}

/// Returns the classifier of `config` with these labels, as it is served. A model without a named problem has the activation of vLLM: the logistic function
/// of one label, and else the softmax.
fn classifier(config: &ConfigFile, tokenizer: &Tokenizer, labels: Labels) -> Result<Classifier> {
    let padding = pad_token(&classifier_file(config, tokenizer.padding_id(), &labels)?)?;
    let activation = match labels.problem_type.as_deref().and_then(ProblemType::named) {
        Some(ProblemType::Regression) => Activation::Identity,
        Some(ProblemType::MultiLabelClassification) => Activation::Sigmoid,
        Some(ProblemType::SingleLabelClassification) => Activation::Softmax,
        None if labels.names.len() == 1 => Activation::Sigmoid,
        None => Activation::Softmax,
    };
    Ok(Classifier { names: labels.names, activation, padding: padding.and_then(|id| u32::try_from(id).ok()) })
}
