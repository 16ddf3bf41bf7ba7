//! What layers need to know about a pass beside their input.

use crate::error::Result;
use crate::mode::Mode;
use crate::param::Fetched;
use crate::recompute::{Recompute, SavedActivations};
use crate::scaling::Casts;
use ottava_tensor::ops::{CodeCopies, SavedActivation, compress};
use ottava_tensor::{Device, Tensor};

/// How the tokens of a micro-batch lie: whole sequences in rows of one length.
#[derive(Clone, Debug)]
pub struct Sequences {
    /// Sequences.
    pub batch: usize,
    /// Tokens per sequence; activations are `[batch · seq_len, …]`.
    pub seq_len: usize,
    /// I32 `[batch · seq_len]`: the position of each token in its sequence. It is data, which a captured step reads anew.
    pub positions: Tensor,
}

impl Sequences {
    /// `batch` sequences of `seq_len` tokens from position 0 on.
    pub fn new(device: &Device, batch: usize, seq_len: usize) -> Result<Sequences> {
        Sequences::at(device, batch, seq_len, 0)
    }

    /// `batch` sequences whose tokens stand at positions `start..start + seq_len`.
    pub fn at(device: &Device, batch: usize, seq_len: usize, start: usize) -> Result<Sequences> {
        let positions: Vec<i32> = (0..batch * seq_len).map(|token| (start + token % seq_len) as i32).collect();
        Ok(Sequences { batch, seq_len, positions: Tensor::from_slice(device, &[batch * seq_len], &positions)? })
    }
}

/// One pass of one micro-batch.
pub struct Context<'a> {
    /// The FP8 casts of the pass, and its mode.
    pub casts: Casts<'a>,
    /// Copies on the device of the weights that lie in the host's memory.
    pub fetched: &'a Fetched,
    /// How its tokens lie.
    pub sequences: &'a Sequences,
    /// What backward computes again.
    pub recompute: Recompute,
    /// The format of what forward keeps.
    pub saved_activations: SavedActivations,
}

impl Context<'_> {
    /// What the pass is for.
    pub fn mode(&self) -> Mode {
        self.casts.mode
    }

    /// The same pass, with the weights of another block.
    pub fn with_weights<'a>(&'a mut self, fetched: &'a Fetched) -> Context<'a> {
        let mode = self.mode();
        Context { casts: self.casts.in_mode(mode), fetched, ..*self }
    }

    /// The forward that backward runs once more, which keeps everything that the rest of backward reads.
    pub fn recomputation(&mut self) -> Context<'_> {
        let mode = self.mode().recomputation();
        Context { casts: self.casts.in_mode(mode), recompute: Recompute::None, ..*self }
    }

    /// The copies of an FP8 operand that forward makes: wgrad contracts it over tokens, unless it is recomputed.
    pub fn operand_copies(&self) -> CodeCopies {
        if self.mode().keeps() && !self.recompute.operands() { CodeCopies::Both } else { CodeCopies::Rows }
    }

    /// Whether forward keeps activations compressed.
    pub fn compresses(&self) -> bool {
        self.mode().keeps() && self.saved_activations == SavedActivations::Float8
    }

    /// An activation as forward keeps it.
    pub fn save(&self, x: Tensor) -> Result<SavedActivation> {
        Ok(if self.compresses() { SavedActivation::Compressed(compress(&x)?) } else { SavedActivation::Exact(x) })
    }
}
