//! Completions of the next generation that begin while the last completions of a generation are drawn, so that a few long completions do not leave the
//! engine with few rows.
//!
//! A completion that is begun ends in the next generation, with the weights of the next generation. Each token keeps the log-probability under the weights
//! that drew it. Keys and values are computed again, because the weights have changed.

use super::sample::{Draw, Drawn, Draws, Sample, seed_of};
use ottava_common::error::Result;
use ottava_engine::Engine;
use ottava_parallel::Ranks;

/// Hashed in place of the seed of the run, for the seed of the remaining tokens of a completion that was begun.
const LATER: u64 = 0x6c61_7465;

/// Steps of the engine between two exchanges of the number of unfinished completions.
const STEPS: usize = 16;

impl Drawn {
    /// Returns the request for the remaining tokens of `draw`, or `None` if the completion is finished.
    pub(super) fn rest(&self, draw: Draw) -> Option<Draw> {
        let Draw { prompt, seed, max_tokens } = draw;
        let known = self.tokens.len();
        let seed = if known == 0 { seed } else { seed_of([LATER, seed, known as u64, 0]) };
        let rest =
            Draw { prompt: [&prompt[..], &self.tokens].concat(), seed, max_tokens: max_tokens.saturating_sub(known) };
        self.end.is_none().then_some(rest)
    }

    /// The whole completion, with the tokens of `rest`, if something was left.
    pub(super) fn with(mut self, rest: Option<Drawn>) -> Drawn {
        if let Some(rest) = rest {
            self.tokens.extend(rest.tokens);
            self.logprobs.extend(rest.logprobs);
            self.end = rest.end;
        }
        self
    }

    /// The completion as a turn after `prompt`.
    pub(super) fn turn(self, prompt: Vec<u32>) -> Sample {
        let end = self.end.expect("the completion is finished");
        Sample::of_turn(prompt, self.tokens, self.logprobs, end)
    }
}

/// Draws the completions `wanted`. While fewer than `most` completions are drawn and the engine has room, begins completions of `ahead`, in their order.
/// Ends when all `ranks` have drawn what they wanted, and returns the finished completions and the tokens of the completions that were begun.
///
/// Errors as [`sample`](super::sample()), on all ranks.
pub(super) fn sample_ahead(
    engine: &mut Engine,
    [wanted, ahead]: [&[Draw]; 2],
    most: usize,
    stop_ids: &[u32],
    ranks: &Ranks,
) -> Result<(Vec<Drawn>, Vec<Drawn>)> {
    let mut draws = Draws::new(stop_ids, 1.0);
    let mut added = wanted.iter().try_for_each(|draw| draws.add(engine, draw));
    let (mut further, most) = (ahead.iter(), most.min(engine.max_batch()));
    loop {
        let is_alone = ranks.size() == 1;
        let ran = added.and_then(|()| run(engine, &mut draws, [wanted.len(), most], &mut further, is_alone));
        let left = ranks.all("drawing completions", ran)?;
        if left.iter().all(|&left| left == 0) {
            break;
        }
        added = Ok(());
    }
    draws.stop(engine)?;
    let begun = draws.drawn.split_off(wanted.len());
    Ok((draws.drawn, begun))
}

/// Runs some steps of the engine, and returns how many of the first `wanted` completions are unfinished. With `is_alone`, ends as soon as none is.
fn run<'d>(
    engine: &mut Engine,
    draws: &mut Draws,
    [wanted, most]: [usize; 2],
    further: &mut impl Iterator<Item = &'d Draw>,
    is_alone: bool,
) -> Result<usize> {
    for _ in 0..STEPS {
        if is_alone && draws.open(wanted) == 0 {
            break;
        }
        while draws.open(usize::MAX) < most {
            let Some(draw) = further.next() else { break };
            draws.add(engine, draw)?;
        }
        if engine.is_idle() {
            break;
        }
        draws.step(engine)?;
    }
    Ok(draws.open(wanted))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objective::rollout::End;

    #[test]
    fn the_rest_of_a_completion_continues_its_tokens() {
        let draw = || Draw { prompt: vec![1, 2], seed: 7, max_tokens: 5 };
        assert_eq!(Drawn::default().rest(draw()), Some(draw()), "nothing is known yet");
        let begun = Drawn { tokens: vec![3, 4], logprobs: vec![-0.5, -0.25], end: None };
        let rest = begun.rest(draw()).unwrap();
        assert_eq!((&rest.prompt[..], rest.max_tokens), (&[1, 2, 3, 4][..], 3));
        assert_ne!(rest.seed, 7, "the first tokens have used this seed");
        let drawn = Drawn { tokens: vec![5], logprobs: vec![-1.0], end: Some(End::Text) };
        let whole = begun.clone().with(Some(drawn)).turn(vec![1, 2]);
        assert_eq!(whole, Sample::of_turn(vec![1, 2], vec![3, 4, 5], vec![-0.5, -0.25, -1.0], End::Text));
        let finished = Drawn { end: Some(End::Length), ..begun };
        assert_eq!(finished.rest(draw()), None);
        assert_eq!(finished.clone().with(None), finished);
    }
}
