//! cuDNN: causal attention in BF16 and F16, forward and backward, built from the backend API.
//!
//! Attention is described as a graph of operations (product, mask, softmax, product), which cuDNN matches to one fused kernel. The
//! pattern is fixed: a graph with another stride of an intermediate gets no plan. Graphs can be planned without a GPU, from its properties.

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

/// Device pointers of documents, at most `documents` of them: their lengths, I32, and where they begin in tensors of fused rows, of
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

/// The numbers that turn a product of query and key into a score.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScoreFactors {
    /// Multiplies products.
    pub(crate) scale: f32,
    /// The bound of scores; read if the shape is capped.
    pub(crate) soft_cap: f32,
}

/// Device pointers of the forward pass: reads `q`, `k`, `v`; writes `o` and `lse`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionForward {
    pub(crate) q: u64,
    pub(crate) k: u64,
    pub(crate) v: u64,
    pub(crate) o: u64,
    pub(crate) lse: u64,
    /// Where documents begin, if the shape has documents.
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

/// Device pointers of what backward needs beside its results: F32 `[B, H, T]`; [`AttentionShape::sum_bytes`] in F32; and
/// [`AttentionShape::heads_bytes`], twice. Null where there are none.
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
            AttentionPass::Forward => graphs::forward(api, shape),
            AttentionPass::Backward => graphs::backward(api, shape),
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

    /// Enqueues the backward pass; [`Attention::prepare`] came before.
    ///
    /// # Safety
    /// As for [`Attention::forward`], and for [`AttentionSums`].
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
        unsafe { self.enqueue_backward(shape, factors, pointers, sums, workspace)? };
        if clears.is_some() {
            return Ok(());
        }
        let clears = !self.has_nan(shape.dtype, pointers.dq, shape.head_dim)?;
        self.clears_dq_sum.insert(*shape, clears);
        // SAFETY: as above.
        if clears { Ok(()) } else { unsafe { self.backward(shape, factors, pointers, sums, workspace) } }
    }

    /// Whether there is a NaN among `count` values, BF16 or F16. Waits for the stream.
    fn has_nan(&self, dtype: DType, address: u64, count: usize) -> Result<bool> {
        let mut bits = vec![0u16; count];
        // SAFETY: the caller's promise of the backward pass, and `bits` is borrowed until the synchronisation.
        unsafe { self.context.copy_to_host(Stream::Compute, bits.as_mut_ptr().cast(), address, 2 * count)? };
        self.context.synchronize()?;
        let is_nan = |bits: &u16| match dtype {
            DType::F16 => half::f16::from_bits(*bits).is_nan(),
            _ => half::bf16::from_bits(*bits).is_nan(),
        };
        Ok(bits.iter().any(is_nan))
    }

    /// # Safety
    /// As for [`Attention::backward`].
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

    /// # Safety
    /// As for [`Plan::enqueue`], without the scalars.
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
        // Versions of cuDNN before 9.19 need up to 33 descriptors of 512 bytes less for few documents.
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
