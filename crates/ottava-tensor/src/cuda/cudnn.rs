//! cuDNN: the forward and backward pass of attention in BF16 and F16, built from the backend API.
//!
//! Attention is described as a graph of operations (product, mask, softmax, product), and cuDNN matches this graph to one fused kernel. The
//! pattern is fixed: a graph with another stride of an intermediate gets no plan. A graph can be planned without a GPU, from the properties of the
//! GPU.

mod backend;
mod graphs;
mod shape;

pub(super) use backend::report;
pub use shape::AttentionShape;

use super::driver::{Context, Stream, library_error};
use crate::dtype::DType;
use crate::error::{Error, Result};
use backend::{Api, DeviceDescription, Graph, On, Plan, Session, Slot, api};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// The device pointers of at most `documents` documents. `lengths` has their lengths in I32. The other pointers have the offsets of the documents as
/// I64 `[documents + 1]`: in fused rows, in rows of the output, and in rows with one value per head.
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

/// The numbers that convert a product of a query and a key to a score.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScoreFactors {
    /// The factor of the products.
    pub(crate) scale: f32,
    /// The bound of the scores. It is read only if the shape is capped.
    pub(crate) soft_cap: f32,
}

/// The device pointers of the forward pass, which reads `q`, `k` and `v` and writes `o` and `lse`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionForward {
    pub(crate) q: u64,
    pub(crate) k: u64,
    pub(crate) v: u64,
    pub(crate) o: u64,
    pub(crate) lse: u64,
    /// The offsets of documents, if the shape has documents.
    pub(crate) documents: DocumentPointers,
}

/// The device pointers of the backward pass. It reads `d_o` and each tensor of the forward pass, and writes `dq`, `dk` and `dv`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionBackward {
    pub(crate) forward: AttentionForward,
    pub(crate) d_o: u64,
    pub(crate) dq: u64,
    pub(crate) dk: u64,
    pub(crate) dv: u64,
}

/// The device pointers of the temporary memory of the backward pass. `rows` is F32 `[B, H, T]`. `dq` has [`AttentionShape::sum_bytes`] bytes in F32.
/// `dk_heads` and `dv_heads` each have [`AttentionShape::heads_bytes`] bytes. Pointers to no bytes are null.
#[derive(Clone, Copy, Debug)]
pub(super) struct AttentionSums {
    pub rows: u64,
    pub dq: u64,
    pub dk_heads: u64,
    pub dv_heads: u64,
}

/// A pass of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum AttentionPass {
    Forward,
    Backward,
}

impl AttentionPass {
    fn graph(self, api: &'static Api, shape: &AttentionShape) -> Result<Graph> {
        shape.check()?;
        match self {
            AttentionPass::Forward => graphs::forward(api, shape),
            AttentionPass::Backward => graphs::backward(api, shape),
        }
    }
}

/// Plans the forward and the backward pass for the device that cuDNN's JSON of properties describes. This needs the driver library but no GPU.
/// Returns the sizes in bytes of the workspaces of the forward and the backward pass.
///
/// Errors: [`Error::Library`] without cuDNN, [`Error::Cuda`] if cuDNN has no kernel for the shape.
pub fn plan_attention(device_json: &str, shape: &AttentionShape) -> Result<[usize; 2]> {
    let api = api()?;
    let device = DeviceDescription::read(api, device_json)?;
    let on = On::Description(&device);
    let forward = AttentionPass::Forward.graph(api, shape)?.plan(on)?;
    let backward = AttentionPass::Backward.graph(api, shape)?.plan(on)?;
    Ok([forward.workspace, backward.workspace])
}

/// The cuDNN library on one device, with its plans.
pub(super) struct Attention {
    api: &'static Api,
    plans: HashMap<(AttentionShape, AttentionPass), Plan>,
    /// Whether the backward plan of a shape clears `dq_sum`. A shape is missing until its first backward pass.
    clears_dq_sum: HashMap<AttentionShape, bool>,
    // The session is dropped after the plans, which refer to it.
    session: Session,
    context: Arc<Context>,
}

// SAFETY: a session may move between threads. A Mutex guards `Attention`, and one thread uses it at a time.
unsafe impl Send for Attention {}

impl Attention {
    pub(super) fn open(context: &Arc<Context>) -> Result<Attention> {
        let api = api()?;
        context.bind()?;
        let session = Session::open(api, context.stream())?;
        Ok(Attention { api, plans: HashMap::new(), clears_dq_sum: HashMap::new(), session, context: context.clone() })
    }

    /// Returns the size in bytes of the workspace of a pass. The first call plans the pass.
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

    /// Enqueues the forward pass, which [`Attention::prepare`] must have planned.
    ///
    /// # Safety
    /// The pointers must name device memory of the shape. `workspace` must have the size that `prepare` returned.
    pub(super) unsafe fn forward(
        &self,
        shape: &AttentionShape,
        factors: ScoreFactors,
        pointers: &AttentionForward,
        workspace: u64,
    ) -> Result<()> {
        let AttentionForward { q, k, v, o, lse, documents } = *pointers;
        let mut bindings = vec![(Slot::Q, q), (Slot::K, k), (Slot::V, v), (Slot::O, o), (Slot::Lse, lse)];
        if shape.documents > 0 {
            bindings.extend(documents.bindings());
        }
        // SAFETY: the caller's promise.
        unsafe { self.enqueue(shape, AttentionPass::Forward, factors, &bindings, workspace) }
    }

    /// Enqueues the backward pass, which [`Attention::prepare`] must have planned.
    ///
    /// # Safety
    /// The conditions of [`Attention::forward`] must hold, and `sums` must have the sizes that [`AttentionSums`] states.
    pub(super) unsafe fn backward(
        &mut self,
        shape: &AttentionShape,
        factors: ScoreFactors,
        pointers: &AttentionBackward,
        sums: &AttentionSums,
        workspace: u64,
    ) -> Result<()> {
        if shape.deterministic {
            // SAFETY: the caller's promise.
            return unsafe { self.enqueue_backward(shape, factors, pointers, sums, workspace) };
        }
        // Most plans clear `dq_sum`, but cuDNN does not document it. The first run fills `dq_sum` with NaN and checks whether `dq` has a NaN.
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
        unsafe { self.enqueue_backward(shape, factors, pointers, sums, workspace)? };
        if clears.is_some() {
            return Ok(());
        }
        let clears = !self.has_nan(shape.dtype, pointers.dq, shape.head_dim)?;
        self.clears_dq_sum.insert(*shape, clears);
        // SAFETY: as above.
        if clears { Ok(()) } else { unsafe { self.backward(shape, factors, pointers, sums, workspace) } }
    }

    /// Returns whether one of `count` BF16 or F16 values is NaN. Waits for the stream.
    fn has_nan(&self, dtype: DType, address: u64, count: usize) -> Result<bool> {
        let mut bits = vec![0u16; count];
        // SAFETY: the caller of the backward pass made this promise, and `bits` is borrowed until the synchronisation.
        unsafe { self.context.copy_to_host(Stream::Compute, bits.as_mut_ptr().cast(), address, 2 * count)? };
        self.context.synchronize()?;
        let is_nan = |bits: &u16| match dtype {
            DType::F16 => half::f16::from_bits(*bits).is_nan(),
            _ => half::bf16::from_bits(*bits).is_nan(),
        };
        Ok(bits.iter().any(is_nan))
    }

    /// Enqueues the backward pass once, without clearing `dq_sum`.
    ///
    /// # Safety
    /// The conditions of [`Attention::backward`] must hold.
    unsafe fn enqueue_backward(
        &self,
        shape: &AttentionShape,
        factors: ScoreFactors,
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
        unsafe { self.enqueue(shape, AttentionPass::Backward, factors, &bindings, workspace) }
    }

    /// Enqueues a pass with `bindings` and the host scalars of the shape.
    ///
    /// # Safety
    /// The conditions of [`Plan::enqueue`] must hold for `bindings`, which exclude the scalars.
    unsafe fn enqueue(
        &self,
        shape: &AttentionShape,
        pass: AttentionPass,
        factors: ScoreFactors,
        bindings: &[(Slot, u64)],
        workspace: u64,
    ) -> Result<()> {
        let mut scalars = vec![(Slot::Scale, factors.scale), (Slot::NegativeInfinity, f32::NEG_INFINITY)];
        scalars.extend((pass == AttentionPass::Backward).then_some((Slot::One, 1.0)));
        scalars.extend((shape.window > 0).then_some((Slot::Window, shape.window as f32)));
        scalars.extend(shape.capped.then_some((Slot::SoftCap, factors.soft_cap)));
        let mut bindings = bindings.to_vec();
        bindings.extend(scalars.iter().map(|(slot, value)| (*slot, std::ptr::from_ref(value) as u64)));
        let plan = self.plans.get(&(*shape, pass)).expect("prepare made the plan");
        self.context.bind()?;
        self.context.record_launch("attention");
        // SAFETY: the caller made this promise, and the scalars live until the call returns.
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

    /// The properties of an H200, as cuDNN writes them.
    const H200: &str = r#"{"deviceId":0,"cudaDeviceId":0,"deviceVer":900,"driverVer":13000,"smVersion":900,
        "totalGlobalMem":150754820096,"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],
        "regsPerBlock":65536,"multiProcessorCount":132,"warpSize":32,"maxSharedMemoryPerBlock":49152,
        "maxSharedMemoryPerBlockOptin":232448,"reservedSharedMemoryPerBlock":1024,"maxRegistersPerSM":65536,
        "maxCtasPerSM":32,"maxThreadsPerBlock":1024,"maxThreadsPerSM":2048,"pciDeviceId":0,"isTccDriver":0,
        "supportCoopLaunch":1,"smClockRateKHz":1980000,"memClockRateKHz":3201000,"l2CacheSize":62914560,
        "deviceName":"NVIDIA H200"}"#;

    #[test]
    fn graphs_are_planned_for_hopper_from_a_description() {
        // Planning loads kernels, and this needs the driver library but no GPU.
        if let Err(problem) = super::super::driver::device_count().and_then(|_| api()) {
            eprintln!("skipped: {problem}");
            return;
        }
        let (mut dry, mut planned) = (Vec::new(), Vec::new());
        for (heads, kv_heads, head_dim, seq, window, capped) in [
            (4, 4, 128, 512, 0, false),
            (4, 2, 128, 100, 0, false),
            (2, 1, 8, 16, 0, false),
            (3, 3, 96, 777, 0, false),
            (3, 3, 96, 4096, 0, false),
            (4, 2, 128, 512, 100, false),
            (4, 2, 256, 777, 0, true),
            (4, 2, 256, 777, 64, true),
        ] {
            for (deterministic, documents) in [(false, 0), (true, 0), (false, 1), (false, 6), (false, 501)] {
                let fused = AttentionShape::fused([2, seq], heads, kv_heads, head_dim);
                for dtype in [DType::BF16, DType::F16] {
                    let shape = AttentionShape { dtype, deterministic, documents, window, capped, ..fused };
                    dry.push(
                        [AttentionPass::Forward, AttentionPass::Backward]
                            .map(|pass| DryGpu::attention_workspace(&shape, pass)),
                    );
                    planned.push(plan_attention(H200, &shape).expect("a plan"));
                }
            }
        }
        for documents in [0, 6] {
            let of_encoder = AttentionShape { causal: false, documents, ..AttentionShape::fused([2, 512], 12, 12, 64) };
            plan_attention(H200, &of_encoder).expect("a plan without a causal mask");
        }
        // For few documents, versions of cuDNN before 9.19 need up to 33 descriptors of 512 bytes less.
        let fits = |(dry, planned): (&[usize; 2], &[usize; 2])| {
            (0..2).all(|pass| planned[pass] <= dry[pass] && dry[pass] - planned[pass] < 33 * 512)
        };
        assert!(dry.iter().zip(&planned).all(fits), "bytes of scratch memory: {dry:?}, cuDNN's {planned:?}");
        let error = plan_attention("{}", &AttentionShape::fused([2, 64], 4, 4, 64)).expect_err("no such device");
        assert!(matches!(error, Error::Cuda { library: "cuDNN", .. }), "{error}");
    }

    #[test]
    fn unsupported_shapes_are_errors() {
        let fine = AttentionShape::fused([2, 64], 4, 2, 32);
        let cases = [
            (AttentionShape { dtype: DType::F32, ..fine }, "not float32"),
            (AttentionShape { kv_heads: 3, ..fine }, "share"),
            (AttentionShape { head_dim: 12, ..fine }, "head size"),
            (AttentionShape { head_dim: 264, ..fine }, "head size"),
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
