//! The engines of ranks that divide a model. Rank 0 leads: it has the requests, and draws their tokens. Before each step, it announces what has
//! happened since the last step, so the engines of all ranks select the same tokens and compute the same passes. The engines of other ranks follow:
//! they do not have grammars, and they neither draw nor report.
//!
//! `Decoder::for_inference` builds this rank's part of each layer. A pass adds partial sums over ranks (`Casts::sum`), and `Decoder::logits` joins
//! the logits of all parts of the vocabulary. The engine of rank 0 announces the tokens of the last step and the calls since that step
//! (`Engine::step`). The engines of other ranks make the same calls, and select and compute the same passes (`Engine::follow`). Only rank 0 makes
//! decisions that depend on clients or sampling. Every rank makes all other decisions by the same code from the same state. Each step compares this
//! state (`EngineStats`).

use crate::batching::Engine;
use crate::flight::Pace;
use crate::request::EngineStats;
use crate::update::{Call, Part, Update};
use ottava_common::error::{Error, Result};
use ottava_common::interrupt;
use ottava_parallel::Ranks;
use std::rc::Rc;

/// The name of announcements in error messages.
const STEP: &str = "step of the engine";

/// Steps between two agreements on a stop of ranks that draw together.
const BETWEEN_CHECKS: usize = 16;

impl Engine {
    /// Makes this engine lead the engines of `ranks`, which divide its model. The other engines [follow](Engine::follow) until [`Engine::finish`].
    /// Before, all ranks must have made the same calls. The engine of a single rank stays unchanged.
    pub fn lead(&mut self, ranks: Rc<Ranks>) {
        if ranks.size() > 1 {
            self.part = Part::Leads(ranks, Update::default());
        }
    }

    /// Repeats the steps of the engine of rank 0 of `ranks`, which [leads](Engine::lead), until it finishes.
    ///
    /// Errors in the same cases as [`Engine::step`], and with [`Error::Tensor`] if another rank ends.
    pub fn follow(&mut self, ranks: &Ranks) -> Result<()> {
        self.part = Part::Follows;
        while let Some(update) = ranks.listen(STEP)? {
            self.apply(update)?;
        }
        ranks.finish()
    }

    /// Makes this engine draw together with the engines of other ranks that divide its model. All these engines get the same calls.
    pub fn draw_together(&mut self, ranks: Rc<Ranks>) {
        if !ranks.draws_alone() {
            self.part = Part::Together(ranks, 0);
        }
    }

    /// Errors with [`Error::Cancelled`] after a request to stop while `doing` something. Call it before each step. Engines of ranks that draw together
    /// stop before the same step.
    pub fn check_stop(&mut self, doing: &str) -> Result<()> {
        let Part::Together(ranks, asked) = &mut self.part else { return interrupt::check(doing) };
        let is_due = asked.is_multiple_of(BETWEEN_CHECKS);
        *asked += 1;
        if is_due { ranks.check_stop_of_draws(doing) } else { Ok(()) }
    }

    /// Ends the engines of the other ranks, if this engine leads them.
    ///
    /// Errors with [`Error::Tensor`] if another rank has already ended.
    pub fn finish(&mut self) -> Result<()> {
        match std::mem::replace(&mut self.part, Part::Alone) {
            Part::Leads(ranks, _) => {
                ranks.announce(STEP, &None::<Update>)?;
                ranks.finish()
            }
            Part::Alone | Part::Together(..) | Part::Follows => Ok(()),
        }
    }

    /// Announces the step of this `pace` that begins, if this engine leads other engines.
    pub(super) fn announce(&mut self, pace: Pace) -> Result<()> {
        let stats = self.stats();
        match &mut self.part {
            Part::Leads(ranks, update) => {
                let update = Update { stats, pace, ..std::mem::take(update) };
                ranks.announce(STEP, &Some(update))
            }
            Part::Alone | Part::Together(..) | Part::Follows => Ok(()),
        }
    }

    /// Stores drawn tokens and the ends of grammars. They are announced before the next step.
    pub(super) fn tell_drawn(&mut self, drawn: Vec<(usize, u32)>) {
        if let Part::Leads(_, update) = &mut self.part {
            let running = self.running.iter().enumerate();
            (update.drawn, update.ends) =
                (drawn, running.filter_map(|(at, sequence)| Some((at, sequence.end?))).collect());
        }
    }

    /// Repeats what rank 0 has done since its last announcement, and then the step that rank 0 begins.
    fn apply(&mut self, Update { drawn, ends, calls, stats, pace }: Update) -> Result<()> {
        let running = self.running.len();
        if drawn.iter().map(|(at, _)| at).chain(ends.iter().map(|(at, _)| at)).any(|&at| at >= running) {
            return Err(self.apart_from(&stats));
        }
        let mut unused = Vec::new();
        ends.into_iter().for_each(|(at, reason)| self.running[at].end = Some(reason));
        self.conclude(drawn.into_iter().map(|(at, token)| (at, token, None)).collect(), &mut unused)?;
        for call in calls {
            match call {
                Call::Add(request) => drop(self.add(*request)?),
                Call::Cancel(id) => self.cancel(id),
                Call::Hold(id) => self.hold(id),
                Call::Resume(id) => self.resume(id),
                Call::Rest(ids) => self.rest(ids),
            }
        }
        if self.stats() != stats {
            return Err(self.apart_from(&stats));
        }
        self.cancelled.clear();
        self.run(pace, &mut unused)?;
        Ok(())
    }

    /// Returns the error of an engine whose state differs from the state of rank 0.
    fn apart_from(&self, first: &EngineStats) -> Error {
        let own = self.stats();
        Error::diverged(format!("the engine state of this rank differs from rank 0: {own:?} here, {first:?} there"))
    }
}
