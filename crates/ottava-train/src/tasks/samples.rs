//! The samples of a run: completions of `generation.prompts` by the model that is trained.

use super::run::{draw_sizes, expect_whole_texts};
use super::texts::complete_all;
use crate::objective::rollout::Drawer;
use ottava_common::error::Result;
use ottava_data::Tokenizer;
use ottava_engine::{Request, Sampling, TextRequest};
use ottava_models::Decoder;
use ottava_parallel::Partition;
use ottava_recipe::mode::StepPrecision;
use ottava_settings::RunConfig;

/// Returns the requests of the samples of a run, in the order of the prompts. Each has a seed of its own.
pub fn sample_requests(config: &RunConfig, tokenizer: &Tokenizer) -> Result<Vec<TextRequest>> {
    let of = &config.generation;
    let request = |(prompt, number): (&String, u64)| {
        let sampling = Sampling {
            temperature: of.temperature,
            top_p: of.top_p,
            seed: config.seed.wrapping_add(number),
            ..Sampling::default()
        };
        let (prompt, max_new_tokens) = (tokenizer.encode_prompt(prompt)?, of.max_new_tokens);
        let request = Request { prompt, sampling, max_new_tokens, ..Request::default() };
        Ok(TextRequest { request, ..TextRequest::default() })
    };
    of.prompts.iter().zip(0..).map(request).collect()
}

/// The samples that a run draws at each evaluation, if `generation.at_evaluations` is on.
pub struct RunSamples {
    requests: Vec<TextRequest>,
    /// Made at the first evaluation.
    drawer: Option<Drawer>,
}

impl RunSamples {
    /// Encodes the prompts of the run of `config`.
    ///
    /// Errors with [`Error::Config`](ottava_common::error::Error::Config) if ranks divide layers or tokens, since the ranks that draw texts have all of them.
    pub fn open(config: &RunConfig, tokenizer: &Tokenizer) -> Result<RunSamples> {
        if !config.generation.at_evaluations {
            return Ok(RunSamples { requests: Vec::new(), drawer: None });
        }
        let instead = "set it to 1, or set `generation.at_evaluations` to false";
        expect_whole_texts(config, "`generation.at_evaluations`", instead)?;
        Ok(RunSamples { requests: sample_requests(config, tokenizer)?, drawer: None })
    }

    /// Returns the completions of the prompts on the leading rank and the ranks that draw together with it, and nothing on other ranks. All ranks of `partition` call it together.
    ///
    /// Errors as [`complete_all`].
    pub fn draw(
        &mut self,
        model: &mut Decoder,
        tokenizer: &Tokenizer,
        partition: &Partition,
        precision: StepPrecision,
    ) -> Result<Vec<String>> {
        let RunSamples { requests, drawer } = self;
        if requests.is_empty() {
            return Ok(Vec::new());
        }
        let longest = requests.iter().map(|of| of.request.prompt.len() + of.request.max_new_tokens).max();
        let sizes = draw_sizes([(requests.len(), longest.unwrap_or(0))].into_iter(), 1);
        let drawer = drawer.get_or_insert_with(|| Drawer::new(sizes));
        let wanted = if partition.ranks().place_of_draws().rank == 0 { requests.clone() } else { Vec::new() };
        model.scaling().set_all_high_precision(precision == StepPrecision::High);
        let drawn = drawer.lend(model, partition, |engine| complete_all(engine, tokenizer, wanted, &mut |_| {}));
        model.scaling().set_all_high_precision(false);
        partition.ranks().together("the samples of the run", drawn)
    }

    /// Frees what samples were drawn with, since the model is built again.
    pub fn forget_model(&mut self) {
        self.drawer = None;
    }
}
