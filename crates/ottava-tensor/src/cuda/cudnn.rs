//! cuDNN: causal attention in BF16, forward and backward, built from the backend API.
//!
//! Attention is described as a graph of operations (product, mask, softmax, product), which cuDNN matches to one fused kernel. The
//! pattern is fixed: a graph with another stride of an intermediate gets no plan. Graphs can be planned without a GPU, from its properties.

mod backend;

pub(super) use backend::report;

use super::driver::{Context, Stream, library_error};
use crate::error::{Error, Result};
use backend::{
    ADD, Api, BF16, DIV, DeviceDescription, Dims, EXP, F32, Graph, I32, I64, IDENTITY, LOG, MAX, MUL, Node, On, Plan,
    SUB, SUM, Session, Slot, Tokens, api, row_major, transposed,
};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// Shape of one attention call. `q` and `o` are `[B, T, H, D]`, `k` and `v` `[B, T, Hkv, D]`, with contiguous
/// heads and a stride between tokens, so that `q`, `k` and `v` may lie in one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Tokens of each sequence.
    pub seq: usize,
    /// Documents that the sequences may be divided into, which attention keeps apart; 0 where each sequence is one document.
    pub documents: usize,
    /// Elements of a head: a multiple of 8, at most 128.
    pub head_dim: usize,
    /// Elements from one token's queries to the next one's; the same for `dq`.
    pub q_stride: usize,
    /// Elements from one token's keys to the next one's; the same for `dk`.
    pub k_stride: usize,
    /// Elements from one token's values to the next one's; the same for `dv`.
    pub v_stride: usize,
    /// Elements from one token's output to the next one's; the same for its gradient.
    pub o_stride: usize,
    /// Whether `dq` is computed without atomic additions.
    pub deterministic: bool,
}

impl AttentionShape {
    /// Queries, keys and values fused in one row per token, `[B * T, (H + 2 Hkv) * D]`, and a contiguous output.
    pub fn fused([batch, seq]: [usize; 2], heads: usize, kv_heads: usize, head_dim: usize) -> AttentionShape {
        let row = (heads + 2 * kv_heads) * head_dim;
        AttentionShape {
            batch,
            heads,
            kv_heads,
            seq,
            documents: 0,
            head_dim,
            q_stride: row,
            k_stride: row,
            v_stride: row,
            o_stride: heads * head_dim,
            deterministic: false,
        }
    }

    /// Elements from one token's gradients of keys, or of values, by each query head to the next one's, with documents. cuDNN takes them to
    /// lie as those of the key heads do, in rows as many times as long as query heads share a key head.
    fn heads_stride(&self) -> usize {
        self.k_stride * (self.heads / self.kv_heads)
    }

    /// Bytes of the gradients of keys, or of values, by each query head, where they are a tensor of ours.
    pub(super) fn heads_bytes(&self) -> usize {
        let ours = self.documents > 0 && self.heads != self.kv_heads;
        if ours { self.batch * self.seq * self.heads_stride() * 2 } else { 0 }
    }

    /// Elements of the log-sum-exp, `[B, H, T]` in F32.
    pub fn lse_len(&self) -> usize {
        self.batch * self.heads * self.seq
    }

    fn check(&self) -> Result<()> {
        let wrong = |text: String| Err(Error::Value(format!("attention: {text}")));
        if [self.batch, self.heads, self.kv_heads, self.seq].contains(&0) {
            return wrong(format!("an empty dimension in {self:?}"));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return wrong(format!("{} query heads cannot share {} key heads evenly", self.heads, self.kv_heads));
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(8) || self.head_dim > 128 {
            return wrong(format!("head size {} is not a multiple of 8 up to 128", self.head_dim));
        }
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        for (name, stride, row) in
            [("q", self.q_stride, q), ("k", self.k_stride, kv), ("v", self.v_stride, kv), ("o", self.o_stride, q)]
        {
            if stride < row || !stride.is_multiple_of(8) {
                return wrong(format!("the stride of {name} is {stride}, not a multiple of 8 of at least {row}"));
            }
        }
        if self.documents > 0
            && (self.deterministic || self.q_stride != self.k_stride || self.k_stride != self.v_stride)
        {
            return wrong("documents need one stride of queries, keys and values, and atomic additions".into());
        }
        Ok(())
    }

    /// What softmax runs over: documents, of which a sequence may be one.
    fn entries(&self) -> usize {
        if self.documents > 0 { self.documents } else { self.batch }
    }

    fn q_dims(&self) -> Dims {
        [self.entries(), self.heads, self.seq, self.head_dim].map(|dim| dim as i64)
    }

    fn kv_dims(&self) -> Dims {
        [self.entries(), self.kv_heads, self.seq, self.head_dim].map(|dim| dim as i64)
    }

    /// Strides of `[B, H, T, D]` with `row` elements between tokens.
    fn strides(&self, row: usize) -> Dims {
        [self.seq * row, self.head_dim, row, 1].map(|stride| stride as i64)
    }

    fn score_dims(&self) -> Dims {
        [self.entries(), self.heads, self.seq, self.seq].map(|dim| dim as i64)
    }

    /// One value per query and head.
    fn row_dims(&self) -> Dims {
        [self.entries(), self.heads, self.seq, 1].map(|dim| dim as i64)
    }

    /// Strides of those: `[B, H, T]`, and `[B · T, H]` of documents.
    fn row_strides(&self) -> Dims {
        if self.documents == 0 {
            return row_major(self.row_dims());
        }
        [self.seq * self.heads, 1, self.heads, 1].map(|stride| stride as i64)
    }

    /// Strides of `dq_sum`, F32 `[B, H, T, D]`. With documents cuDNN takes it to lie as `dq` does.
    fn sum_strides(&self) -> Dims {
        if self.documents == 0 { row_major(self.q_dims()) } else { self.strides(self.q_stride) }
    }

    /// Bytes of `dq_sum`.
    pub(super) fn sum_bytes(&self) -> usize {
        let of_token = if self.documents == 0 { self.heads * self.head_dim } else { self.q_stride };
        if self.deterministic { 0 } else { self.batch * self.seq * of_token * 4 }
    }
}

/// Device pointers of documents, of which there may be `documents`: their lengths, I32, and where they begin in tensors of fused rows, of
/// rows of the output and of rows with a value per head, I64 `[documents + 1]`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DocumentPointers {
    pub(crate) lengths: u64,
    pub(crate) fused: u64,
    pub(crate) output: u64,
    pub(crate) rows: u64,
}

impl DocumentPointers {
    fn bindings(&self) -> [(Slot, u64); 4] {
        let DocumentPointers { lengths, fused, output, rows } = *self;
        let slots = [Slot::Lengths, Slot::FusedOffsets, Slot::OutputOffsets, Slot::RowOffsets];
        let pointers = [lengths, fused, output, rows];
        std::array::from_fn(|i| (slots[i], pointers[i]))
    }
}

/// The tensors of [`DocumentPointers`] in a graph; all `None` where sequences are documents.
struct Documents {
    lengths: Option<Node>,
    fused: Option<Node>,
    output: Option<Node>,
    rows: Option<Node>,
}

impl Documents {
    fn new(g: &mut Graph, shape: &AttentionShape) -> Result<Documents> {
        if shape.documents == 0 {
            return Ok(Documents { lengths: None, fused: None, output: None, rows: None });
        }
        let documents = shape.documents as i64;
        let mut vector = |slot, dtype, len| g.input(slot, dtype, [len, 1, 1, 1], [1; 4]).map(Some);
        Ok(Documents {
            lengths: vector(Slot::Lengths, I32, documents)?,
            fused: vector(Slot::FusedOffsets, I64, documents + 1)?,
            output: vector(Slot::OutputOffsets, I64, documents + 1)?,
            rows: vector(Slot::RowOffsets, I64, documents + 1)?,
        })
    }
}

/// Device pointers of the forward pass: reads `q`, `k`, `v`; writes `o` and `lse`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionForward {
    pub(crate) q: u64,
    pub(crate) k: u64,
    pub(crate) v: u64,
    pub(crate) o: u64,
    pub(crate) lse: u64,
    /// Of a shape with documents.
    pub(crate) documents: DocumentPointers,
}

/// Device pointers of the backward pass: reads all of the forward pass and `d_o`; writes `dq`, `dk`, `dv`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionBackward {
    pub(crate) forward: AttentionForward,
    pub(crate) d_o: u64,
    pub(crate) dq: u64,
    pub(crate) dk: u64,
    pub(crate) dv: u64,
}

/// `S = scale · Q Kᵀ`, masked; `P = softmax(S)`; `O = P V`; `lse = log Σ exp S`.
fn forward_graph(api: &'static Api, shape: &AttentionShape) -> Result<Graph> {
    let mut g = Graph::new(api);
    let Documents { lengths, fused, output, rows } = Documents::new(&mut g, shape)?;
    let (q_dims, kv_dims, row_dims) = (shape.q_dims(), shape.kv_dims(), shape.row_dims());
    let q = g.packed_input(Slot::Q, BF16, q_dims, shape.strides(shape.q_stride), fused)?;
    let k_strides = transposed(shape.strides(shape.k_stride));
    let k = g.packed_input(Slot::K, BF16, transposed(kv_dims), k_strides, fused)?;
    let v = g.packed_input(Slot::V, BF16, kv_dims, shape.strides(shape.v_stride), fused)?;
    let o = g.packed_input(Slot::O, BF16, q_dims, shape.strides(shape.o_stride), output)?;
    let lse = g.packed_input(Slot::Lse, F32, row_dims, shape.row_strides(), rows)?;
    let (scale, negative_infinity) = (g.scalar(Slot::Scale)?, g.scalar(Slot::NegativeInfinity)?);

    let scores = g.intermediate(F32, shape.score_dims())?;
    g.matmul_into(q, k, scores, Tokens::RowsAndColumns, lengths)?;
    let scores = g.pointwise(MUL, scores, Some(scale))?;
    let scores = g.within(scores, lengths, negative_infinity)?;
    let scores = g.causal(scores, negative_infinity)?;
    let largest = g.reduce(MAX, scores, row_dims)?;
    let shifted = g.pointwise(SUB, scores, Some(largest))?;
    let exponentials = g.pointwise(EXP, shifted, None)?;
    let sum = g.reduce(SUM, exponentials, row_dims)?;
    let log = g.pointwise(LOG, sum, None)?;
    g.pointwise_into(ADD, F32, None, largest, Some(log), None, lse)?;
    let p = g.intermediate(BF16, shape.score_dims())?;
    g.pointwise_into(DIV, F32, None, exponentials, Some(sum), None, p)?;
    g.matmul_into(p, v, o, Tokens::RowsAndContracted, lengths)?;
    Ok(g)
}

/// With `P = exp(S - lse)` recomputed: `dV = Pᵀ dO`, `dS = P ∘ (dO Vᵀ - rowsum(dO ∘ O)) · scale`, `dK = dSᵀ Q`,
/// `dQ = dS K`; key heads sum over the query heads that share them.
fn backward_graph(api: &'static Api, shape: &AttentionShape) -> Result<Graph> {
    let mut g = Graph::new(api);
    let Documents { lengths, fused, output, rows } = Documents::new(&mut g, shape)?;
    let (q_dims, kv_dims, row_dims) = (shape.q_dims(), shape.kv_dims(), shape.row_dims());
    let (q_strides, o_strides) = (shape.strides(shape.q_stride), shape.strides(shape.o_stride));
    let (k_strides, v_strides) = (shape.strides(shape.k_stride), shape.strides(shape.v_stride));
    let q = g.packed_input(Slot::Q, BF16, q_dims, q_strides, fused)?;
    let k = g.packed_input(Slot::K, BF16, transposed(kv_dims), transposed(k_strides), fused)?;
    let v = g.packed_input(Slot::V, BF16, transposed(kv_dims), transposed(v_strides), fused)?;
    let o = g.packed_input(Slot::O, BF16, q_dims, o_strides, output)?;
    let d_o = g.packed_input(Slot::DO, BF16, q_dims, o_strides, output)?;
    let lse = g.packed_input(Slot::Lse, F32, row_dims, shape.row_strides(), rows)?;
    let dq = g.packed_input(Slot::DQ, BF16, q_dims, q_strides, fused)?;
    let dk = g.packed_input(Slot::DK, BF16, kv_dims, k_strides, fused)?;
    let dv = g.packed_input(Slot::DV, BF16, kv_dims, v_strides, fused)?;
    let row_sum = g.packed_input(Slot::RowSum, F32, row_dims, shape.row_strides(), rows)?;
    let (scale, negative_infinity) = (g.scalar(Slot::Scale)?, g.scalar(Slot::NegativeInfinity)?);
    let one = g.scalar(Slot::One)?;
    // The transposed score matrix.
    let score_strides = row_major(shape.score_dims());
    let by_columns = transposed(score_strides);

    let product = g.pointwise(MUL, d_o, Some(o))?;
    let sum = g.reduce(SUM, product, row_dims)?;
    g.pointwise_into(MUL, F32, None, sum, Some(one), None, row_sum)?;

    let scores = g.intermediate(F32, shape.score_dims())?;
    g.matmul_into(q, k, scores, Tokens::RowsAndColumns, lengths)?;
    let scores = g.pointwise(MUL, scores, Some(scale))?;
    let scores = g.within(scores, lengths, negative_infinity)?;
    let shifted = g.pointwise(SUB, scores, Some(lse))?;
    let masked = g.causal(shifted, negative_infinity)?;
    let p = g.pointwise(EXP, masked, None)?;

    let over_tokens = Tokens::RowsAndContracted;
    let sum_over_group = |g: &mut Graph, a: Node, b: Node, out: Node, heads: Slot| {
        if shape.heads == shape.kv_heads {
            return g.matmul_into(a, b, out, over_tokens, lengths);
        }
        let per_head = match fused {
            // cuDNN would make room for as many tokens in each document as a sequence has. It multiplies offsets of the key heads.
            Some(fused) => g.packed_input(heads, BF16, q_dims, shape.strides(shape.heads_stride()), Some(fused))?,
            None => g.intermediate(BF16, q_dims)?,
        };
        g.matmul_into(a, b, per_head, over_tokens, lengths)?;
        g.reduce_into(SUM, per_head, out)
    };
    let p_by_columns = g.transpose(p, by_columns, None)?;
    sum_over_group(&mut g, p_by_columns, d_o, dv, Slot::DVHeads)?;

    let dp = g.intermediate(F32, shape.score_dims())?;
    g.matmul_into(d_o, v, dp, Tokens::RowsAndColumns, lengths)?;
    let ds = g.pointwise(SUB, dp, Some(row_sum))?;
    let ds = g.pointwise(MUL, ds, Some(p))?;
    let ds = g.pointwise(MUL, ds, Some(scale))?;
    let ds_by_columns = g.transpose(ds, by_columns, None)?;
    sum_over_group(&mut g, ds_by_columns, q, dk, Slot::DKHeads)?;

    let k_rows = g.transpose(k, k_strides, fused)?;
    // Without `dq_sum`, cuDNN chooses an engine that stores the gradient of the scores and needs no atomic additions.
    if shape.deterministic {
        g.matmul_into(ds, k_rows, dq, over_tokens, lengths)?;
    } else {
        let dq_sum = g.packed_input(Slot::DQSum, F32, q_dims, shape.sum_strides(), fused)?;
        g.matmul_into(ds, k_rows, dq_sum, over_tokens, lengths)?;
        g.pointwise_into(IDENTITY, F32, None, dq_sum, None, None, dq)?;
    }
    Ok(g)
}

/// Device pointers of what backward needs beside its results: F32 `[B, H, T]`; [`AttentionShape::sum_bytes`] in F32; and
/// [`AttentionShape::heads_bytes`] in BF16, twice. Null where there are none.
#[derive(Clone, Copy, Debug)]
pub(super) struct AttentionSums {
    pub rows: u64,
    pub dq: u64,
    pub dk_heads: u64,
    pub dv_heads: u64,
}

/// Forward or backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum AttentionPass {
    Forward,
    Backward,
}

impl AttentionPass {
    fn graph(self, api: &'static Api, shape: &AttentionShape) -> Result<Graph> {
        shape.check()?;
        match self {
            AttentionPass::Forward => forward_graph(api, shape),
            AttentionPass::Backward => backward_graph(api, shape),
        }
    }
}

/// Plans both passes for a device described by cuDNN's JSON of its properties. Needs the driver library but no GPU.
/// Returns the workspace of forward and backward in bytes.
///
/// Errors: [`Error::Library`] without cuDNN, [`Error::Cuda`] when it has no kernel for the shape.
pub fn plan_attention(device_json: &str, shape: &AttentionShape) -> Result<[usize; 2]> {
    let api = api()?;
    let device = DeviceDescription::read(api, device_json)?;
    let on = On::Description(&device);
    let forward = AttentionPass::Forward.graph(api, shape)?.plan(on)?;
    let backward = AttentionPass::Backward.graph(api, shape)?.plan(on)?;
    Ok([forward.workspace, backward.workspace])
}

/// cuDNN on one device, with its plans.
pub(super) struct Attention {
    api: &'static Api,
    plans: HashMap<(AttentionShape, AttentionPass), Plan>,
    /// Whether the backward plan of a shape clears `dq_sum`, once known.
    clears_dq_sum: HashMap<AttentionShape, bool>,
    // Dropped after the plans, which belong to it.
    session: Session,
    context: Arc<Context>,
}

// SAFETY: a session may move between threads; `Attention` is used by one at a time, behind a Mutex.
unsafe impl Send for Attention {}

impl Attention {
    pub(super) fn open(context: &Arc<Context>) -> Result<Attention> {
        let api = api()?;
        context.bind()?;
        let session = Session::open(api, context.stream())?;
        Ok(Attention { api, plans: HashMap::new(), clears_dq_sum: HashMap::new(), session, context: context.clone() })
    }

    /// Workspace of a pass in bytes. The first call plans it.
    pub(super) fn prepare(&mut self, shape: &AttentionShape, pass: AttentionPass) -> Result<usize> {
        self.context.bind()?;
        if !self.plans.contains_key(&(*shape, pass)) {
            let _timing = self.context.lock_timing();
            let start = Instant::now();
            let plan = pass.graph(self.api, shape)?.plan(On::Session(&self.session))?;
            tracing::debug!("attention {pass:?} of {shape:?} planned in {:.2?}", start.elapsed());
            self.plans.insert((*shape, pass), plan);
        }
        Ok(self.plans[&(*shape, pass)].workspace)
    }

    /// Enqueues the forward pass; [`Attention::prepare`] came before.
    ///
    /// # Safety
    /// The pointers name device memory of the shape, `workspace` of the size that `prepare` returned.
    pub(super) unsafe fn forward(
        &self,
        shape: &AttentionShape,
        scale: f32,
        pointers: &AttentionForward,
        workspace: u64,
    ) -> Result<()> {
        let AttentionForward { q, k, v, o, lse, documents } = *pointers;
        let mut bindings = vec![(Slot::Q, q), (Slot::K, k), (Slot::V, v), (Slot::O, o), (Slot::Lse, lse)];
        if shape.documents > 0 {
            bindings.extend(documents.bindings());
        }
        // SAFETY: the caller's promise.
        unsafe { self.enqueue(shape, AttentionPass::Forward, scale, &bindings, workspace) }
    }

    /// Enqueues the backward pass; [`Attention::prepare`] came before.
    ///
    /// # Safety
    /// As for [`Attention::forward`], and for [`AttentionSums`].
    pub(super) unsafe fn backward(
        &mut self,
        shape: &AttentionShape,
        scale: f32,
        pointers: &AttentionBackward,
        sums: &AttentionSums,
        workspace: u64,
    ) -> Result<()> {
        if shape.deterministic {
            // SAFETY: the caller's promise.
            return unsafe { self.enqueue_backward(shape, scale, pointers, sums, workspace) };
        }
        // Most plans clear `dq_sum`, but cuDNN does not document it. The first run fills it with NaN to find out.
        let clears = self.clears_dq_sum.get(shape).copied();
        let bytes = shape.sum_bytes();
        match clears {
            Some(true) => {}
            // SAFETY: the caller's promise.
            Some(false) => unsafe { self.context.fill(sums.dq, 0, bytes)? },
            // SAFETY: as above.
            None => unsafe { self.context.fill(sums.dq, 0xff, bytes)? },
        }
        // SAFETY: as above.
        unsafe { self.enqueue_backward(shape, scale, pointers, sums, workspace)? };
        if clears.is_some() {
            return Ok(());
        }
        let clears = !self.has_nan(pointers.dq, shape.head_dim)?;
        self.clears_dq_sum.insert(*shape, clears);
        // SAFETY: as above.
        if clears { Ok(()) } else { unsafe { self.backward(shape, scale, pointers, sums, workspace) } }
    }

    /// Whether there is a NaN among `count` BF16 values. Waits for the stream.
    fn has_nan(&self, address: u64, count: usize) -> Result<bool> {
        let mut bits = vec![0u16; count];
        // SAFETY: the caller's promise of the backward pass, and `bits` is borrowed until the synchronisation.
        unsafe { self.context.copy_to_host(Stream::Compute, bits.as_mut_ptr().cast(), address, 2 * count)? };
        self.context.synchronize()?;
        Ok(bits.iter().any(|bits| half::bf16::from_bits(*bits).is_nan()))
    }

    /// # Safety
    /// As for [`Attention::backward`].
    unsafe fn enqueue_backward(
        &self,
        shape: &AttentionShape,
        scale: f32,
        pointers: &AttentionBackward,
        sums: &AttentionSums,
        workspace: u64,
    ) -> Result<()> {
        let AttentionBackward { forward, d_o, dq, dk, dv } = *pointers;
        let AttentionForward { q, k, v, o, lse, documents } = forward;
        let mut bindings = vec![
            (Slot::Q, q),
            (Slot::K, k),
            (Slot::V, v),
            (Slot::O, o),
            (Slot::Lse, lse),
            (Slot::DO, d_o),
            (Slot::DQ, dq),
            (Slot::DK, dk),
            (Slot::DV, dv),
            (Slot::RowSum, sums.rows),
        ];
        if !shape.deterministic {
            bindings.push((Slot::DQSum, sums.dq));
        }
        if shape.documents > 0 {
            bindings.extend(documents.bindings());
        }
        if shape.heads_bytes() > 0 {
            bindings.extend([(Slot::DKHeads, sums.dk_heads), (Slot::DVHeads, sums.dv_heads)]);
        }
        // SAFETY: the caller's promise.
        unsafe { self.enqueue(shape, AttentionPass::Backward, scale, &bindings, workspace) }
    }

    /// # Safety
    /// As for [`Plan::enqueue`], without the scalars.
    unsafe fn enqueue(
        &self,
        shape: &AttentionShape,
        pass: AttentionPass,
        scale: f32,
        bindings: &[(Slot, u64)],
        workspace: u64,
    ) -> Result<()> {
        let scalars = [(Slot::Scale, scale), (Slot::NegativeInfinity, f32::NEG_INFINITY), (Slot::One, 1.0)];
        let mut bindings = bindings.to_vec();
        let used = if pass == AttentionPass::Forward { 2 } else { 3 };
        bindings.extend(scalars[..used].iter().map(|(slot, value)| (*slot, std::ptr::from_ref(value) as u64)));
        let plan = self.plans.get(&(*shape, pass)).expect("prepare made the plan");
        self.context.bind()?;
        self.context.record_launch("attention");
        // SAFETY: the caller's promise; the scalars live until the call returns.
        match unsafe { plan.enqueue(&self.session, &bindings, workspace) } {
            Err(Error::Cuda { library, call, message }) => Err(library_error(&self.context, library, &call, message)),
            other => other,
        }
    }
}

impl Drop for Attention {
    fn drop(&mut self) {
        // The fields are destroyed in this context.
        let _ = self.context.bind();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::dry::DryGpu;

    /// cuDNN's properties of an H200.
    const H200: &str = r#"{"deviceId":0,"cudaDeviceId":0,"deviceVer":900,"driverVer":13000,"smVersion":900,
        "totalGlobalMem":150754820096,"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],
        "regsPerBlock":65536,"multiProcessorCount":132,"warpSize":32,"maxSharedMemoryPerBlock":49152,
        "maxSharedMemoryPerBlockOptin":232448,"reservedSharedMemoryPerBlock":1024,"maxRegistersPerSM":65536,
        "maxCtasPerSM":32,"maxThreadsPerBlock":1024,"maxThreadsPerSM":2048,"pciDeviceId":0,"isTccDriver":0,
        "supportCoopLaunch":1,"smClockRateKHz":1980000,"memClockRateKHz":3201000,"l2CacheSize":62914560,
        "deviceName":"NVIDIA H200"}"#;

    #[test]
    fn graphs_are_planned_for_hopper_from_a_description() {
        // Planning loads kernels, which needs the driver library but no GPU.
        if let Err(problem) = super::super::driver::device_count().and_then(|_| api()) {
            eprintln!("skipped: {problem}");
            return;
        }
        let (mut dry, mut planned) = (Vec::new(), Vec::new());
        for (heads, kv_heads, head_dim, seq) in
            [(4, 4, 128, 512), (4, 2, 128, 100), (2, 1, 8, 16), (3, 3, 96, 777), (3, 3, 96, 4096)]
        {
            for deterministic in [false, true] {
                let shape =
                    AttentionShape { deterministic, ..AttentionShape::fused([2, seq], heads, kv_heads, head_dim) };
                dry.push(
                    [AttentionPass::Forward, AttentionPass::Backward]
                        .map(|pass| DryGpu::attention_workspace(&shape, pass)),
                );
                planned.push(plan_attention(H200, &shape).expect("a plan"));
            }
        }
        assert_eq!(dry, planned, "bytes of scratch memory");
        let error = plan_attention("{}", &AttentionShape::fused([2, 64], 4, 4, 64)).expect_err("no such device");
        assert!(matches!(error, Error::Cuda { library: "cuDNN", .. }), "{error}");
    }

    #[test]
    fn unsupported_shapes_are_errors() {
        let fine = AttentionShape::fused([2, 64], 4, 2, 32);
        let cases = [
            (AttentionShape { kv_heads: 3, ..fine }, "share"),
            (AttentionShape { head_dim: 12, ..fine }, "head size"),
            (AttentionShape { head_dim: 136, ..fine }, "head size"),
            (AttentionShape { seq: 0, ..fine }, "empty"),
            (AttentionShape { o_stride: 64, ..fine }, "stride of o"),
            (AttentionShape { q_stride: 260, ..fine }, "stride of q"),
        ];
        assert!(fine.check().is_ok());
        for (shape, words) in cases {
            let message = shape.check().expect_err("an impossible shape").to_string();
            assert!(message.contains(words), "{message}");
        }
    }
}
