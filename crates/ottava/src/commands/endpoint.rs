//! The endpoint of `ottava train`, where clients draw completions and return them.

use super::serve::MAX_CONNECTIONS;
use ottava_common::Result;
use ottava_data::Tokenizer;
use ottava_engine::{Pooling, Sampling};
use ottava_serve::{Endpoint, Model, Options, ReasoningParser, ToolCallParser};
use ottava_settings::RunConfig;
use std::time::Duration;

/// The variable with the key that clients must send, as for `ottava serve`.
const API_KEY: &str = "OTTAVA_API_KEY";
/// The maximum number of running and waiting requests.
const MAX_REQUESTS: usize = 1024;
/// The time limit of a client, as the default of `ottava serve`.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(75);

/// Starts the endpoint of the run of `config`.
///
/// Errors with [`ottava_common::Error::Io`] if the address cannot be used.
pub fn start(config: &RunConfig) -> Result<Endpoint> {
    let endpoint = &config.reinforcement.endpoint;
    let (address, api_key) = (endpoint.socket_address()?, std::env::var(API_KEY).ok().filter(|key| !key.is_empty()));
    if !address.ip().is_loopback() && api_key.is_none() {
        tracing::warn!("{} can be reached from other machines, and {API_KEY} is not set", address.ip());
    }
    let name = config.model.path.display().to_string();
    let options = Options {
        address,
        names: vec![name.clone()],
        max_requests: MAX_REQUESTS,
        max_connections: MAX_CONNECTIONS,
        client_timeout: CLIENT_TIMEOUT,
        api_key,
        shutdown_timeout: Duration::ZERO,
        allowed_origins: Vec::new(),
        strict: false,
    };
    let (tokenizer, sizes) = (Tokenizer::load(config.tokenizer_path())?, config.decoder_config()?);
    let template = config.chat_template(&tokenizer)?;
    let model = Model {
        root: name,
        adapters: Vec::new(),
        open_adapters: None,
        tool_call_parser: template.as_ref().and_then(ToolCallParser::of_template),
        reasoning_parser: template.as_ref().and_then(ReasoningParser::of_template),
        template,
        tokenizer,
        vocabulary: sizes.vocabulary,
        channels: sizes.stream.channels,
        pooling: Pooling::Last,
        is_encoder: false,
        classifier: None,
        max_model_len: config.data.max_length,
        // The head of the model applies the temperature of the run.
        sampling: Sampling::unchanged(),
    };
    Endpoint::start(&options, model, endpoint.max_staleness)
}
