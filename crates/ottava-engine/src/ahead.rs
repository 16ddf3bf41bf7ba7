//! Asynchronous scheduling: a decode step is launched before the host has read the tokens of the step before. So the host reports tokens and prepares
//! steps while the device computes.
//!
//! A step is in flight from its launch until the host reads its tokens. The next step takes these tokens on the device (`InferenceBatch::take_ids`).
//! It computes each request that goes on if its token in flight does not end it. If this token ends the request, the further token is not
//! reported.
//!
//! Steps are only launched ahead if nothing but drawn tokens can change between them: all running requests draw a token, none waits for a free place,
//! and the settings of no draw depend on earlier tokens ([`Sequence::can_draw_ahead`](crate::sequence::Sequence::can_draw_ahead)). Each other step begins after the tokens
//! of the step before were read. Among ranks, rank 0 decides ([`Pace`]), and each rank draws the same tokens on its device.

use crate::batching::{Drawn, Engine};
use crate::decode::{in_f32, not_finite};
use crate::flight::{Flight, Memory, Pace};
use crate::passes::MOST_ROWS;
use crate::request::{LogprobsMode, TokenLogprob};
use crate::update::Part;
use bytemuck::AnyBitPattern;
use ottava_common::error::Result;
use ottava_models::SequenceTokens;
use ottava_tensor::ops::Draw;
use ottava_tensor::{DType, Device, Snapshot, Tensor};

impl Engine {
    /// Returns the pace of the next step.
    pub(super) fn pace(&self) -> Pace {
        let may_launch = self.options.async_scheduling && self.may_launch_ahead();
        match (&self.ahead.flight, may_launch) {
            (None, false) => Pace::Whole,
            (None, true) => Pace::Begin,
            (Some(flight), true) if self.continuing(flight).next().is_some() => Pace::Continue,
            (Some(_), _) => Pace::End,
        }
    }

    /// Returns whether a decode step of all running requests can be launched before the tokens of the step before are known.
    fn may_launch_ahead(&self) -> bool {
        let has_place = !self.waiting.is_empty() && self.running.len() < self.options.max_batch;
        let is_simple = self.proposer.is_none() && !self.pools.has_states() && self.fixed_rows().is_none();
        let adapter = self.running.first().and_then(|sequence| sequence.request.adapter);
        let with_top = if self.options.logprobs_mode == LogprobsMode::Loss { None } else { Some(0) };
        is_simple
            && !has_place
            && (1..=MOST_ROWS).contains(&self.running.len())
            && self
                .running
                .iter()
                .all(|of| of.can_draw_ahead() && of.request.logprobs <= with_top && of.request.adapter == adapter)
    }

    /// Returns the requests of the step in flight that go on if its tokens do not end them: the number of the request in `running`, and its row.
    fn continuing<'a>(&'a self, flight: &'a Flight) -> impl Iterator<Item = (usize, usize)> + 'a {
        let places = flight.places(self.running.iter().map(|sequence| sequence.id));
        places.filter(|&(at, _)| self.running[at].tokens.len() + 1 < self.running[at].max_len)
    }

    /// Launches the step after `flight`. Returns `None` if no memory is left for the keys and values of all its requests.
    pub(super) fn launch_after(&mut self, flight: &Flight) -> Result<Option<Flight>> {
        let (places, rows): (Vec<usize>, Vec<usize>) = self.continuing(flight).unzip();
        for &at in &places {
            let sequence = &mut self.running[at];
            if !self.pools.extend(&mut sequence.blocks, sequence.computed, sequence.tokens.len() + 1) {
                return Ok(None);
            }
        }
        self.launch(&places, Some(&rows)).map(Some)
    }

    /// Launches a decode step of the requests with the numbers `places` in `running`. If a step is in flight, `rows` has their rows in it.
    pub(super) fn launch(&mut self, places: &[usize], rows: Option<&[usize]>) -> Result<Flight> {
        let adapter = places.first().and_then(|&at| self.running[at].request.adapter);
        self.set_adapter(adapter);
        self.invariantly(|engine| engine.launch_pass(places, rows))
    }

    fn launch_pass(&mut self, places: &[usize], rows: Option<&[usize]>) -> Result<Flight> {
        let device = self.model.device().clone();
        if self.ahead.memory.is_none() {
            let bytes = 3 * Snapshot::padded(MOST_ROWS * DType::I32.size());
            let results = [Snapshot::new(&device, bytes)?, Snapshot::new(&device, bytes)?];
            self.ahead.memory = Some(Memory { tokens: Tensor::zeros(&device, &[MOST_ROWS], DType::I32)?, results });
        }
        let Engine { model, adapter, cache, steps, running, ahead, .. } = &mut *self;
        let Memory { tokens, .. } = ahead.memory.as_ref().expect("made above");
        let sequences = places.iter().map(|&at| &running[at]);
        let last: Vec<[u32; 1]> = sequences.clone().map(|of| [of.tokens[of.tokens.len() - 1]]).collect();
        let sequences: Vec<SequenceTokens> = sequences
            .zip(&last)
            .map(|(of, last)| SequenceTokens::new(of.computed, last, &of.blocks.tables).in_slot(of.blocks.slot()))
            .collect();
        let scored = steps.run(model, *adapter, cache, &sequences, rows.map(|rows| (tokens, rows)))?;
        // The host knows all tokens but the token in flight.
        let unknown = usize::from(rows.is_some());
        let (mut drawn, mut logprobs) = (scored.likeliest.clone(), None);
        if !places.iter().all(|&at| running[at].is_plain(unknown)) {
            let logits = in_f32(&scored.logits)?;
            let mut draws: Vec<Draw> = places.iter().map(|&at| running[at].draw_after(unknown)).collect();
            draws.resize(drawn.len(), Draw::GREEDY);
            let (tokens, of_tokens) = self.sample(&logits, &draws)?;
            (drawn, logprobs) = (tokens, Some(of_tokens));
        }
        let Engine { running, ahead, .. } = self;
        let Memory { tokens, results } = ahead.memory.as_mut().expect("made above");
        tokens.copy_from(0, &drawn)?;
        let number = ahead.launched % 2;
        ahead.launched += 1;
        results[number].clear();
        let places_of_results = [
            results[number].copy(&scored.likeliest)?,
            results[number].copy(&drawn)?,
            logprobs.map_or(Ok(0..0), |logprobs| results[number].copy(&logprobs))?,
        ];
        let requests = places.iter().map(|&at| running[at].id).collect();
        Ok(Flight { requests, number, results: places_of_results, is_counted: rows.is_none() })
    }

    /// Waits for the tokens of a step that was in flight, and returns them. An engine that follows does not wait, since rank 0 announces the tokens.
    ///
    /// Errors with [`Error::NonFinite`] for logits that are infinite or NaN.
    pub(super) fn land(&mut self, flight: &Flight) -> Result<Vec<Drawn>> {
        if matches!(self.part, Part::Follows) {
            return Ok(Vec::new());
        }
        let Memory { results, .. } = self.ahead.memory.as_mut().expect("a step was launched");
        results[flight.number].wait()?;
        let bytes = |which: usize| results[flight.number].bytes(flight.results[which].clone());
        let [likeliest, tokens]: [Vec<i32>; 2] = [0, 1].map(|which| numbers(&bytes(which)));
        let logprobs: Vec<f32> = numbers(&bytes(2));
        let mut drawn = Vec::new();
        for (at, row) in flight.places(self.running.iter().map(|sequence| sequence.id)) {
            let sequence = &self.running[at];
            if likeliest[row] < 0 {
                return Err(not_finite(sequence.tokens.len() + 1));
            }
            let token = tokens[row] as u32;
            let logprob = sequence.request.logprobs.map(|_| logprobs[row]);
            drawn.push((at, token, logprob.map(|logprob| TokenLogprob { token, logprob, top: Box::default() })));
        }
        Ok(drawn)
    }

    /// Lets requests count the tokens that the step in flight computes, after the tokens of the step before were added. Without running requests, no
    /// token of the step is read.
    pub(super) fn count_flight(&mut self) {
        if self.running.is_empty() {
            self.ahead.flight = None;
        }
        let Some(mut flight) = self.ahead.flight.take() else { return };
        if !flight.is_counted {
            let places: Vec<_> = flight.places(self.running.iter().map(|sequence| sequence.id)).collect();
            places.into_iter().for_each(|(at, _)| self.extend_computed(at, 1));
            flight.is_counted = true;
        }
        self.ahead.flight = Some(flight);
    }

    /// Runs `work`. On a GPU with `batch_invariant`, sums of products do not depend on the number of rows within it.
    pub(super) fn invariantly<T>(&mut self, work: impl FnOnce(&mut Engine) -> T) -> T {
        match self.model.device().clone() {
            Device::Cuda(gpu) if self.options.batch_invariant => gpu.with_batch_invariance(|| work(self)),
            _ => work(self),
        }
    }
}

/// Returns the numbers that `bytes` hold.
fn numbers<T: AnyBitPattern>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}
