use super::{AttentionBackend, AttentionInput, AttentionSpec};
use crate::cuda::{
    Arg, AttentionBackward, AttentionForward, AttentionShape, CudaDevice, DocumentPointers, Kernel, ScoreFactors,
};
use crate::ops::launch::{self, BLOCK, Defines, kernel_source};
use crate::{Capability, DType, Error, Result, Tensor};
use std::sync::Arc;

kernel_source!("attention");

/// Storage types, for fused queries, keys and values with a causal mask, then with `GENERAL` for all specs.
pub(crate) const VARIANTS: &[Defines] = &[
    &[("X", "f32")],
    &[("X", "f16")],
    &[("X", "bf16")],
    &[("X", "f32"), ("GENERAL", "1")],
    &[("X", "f16"), ("GENERAL", "1")],
    &[("X", "bf16"), ("GENERAL", "1")],
];

/// Whether the kernels without `GENERAL` support a call.
fn is_plain(input: &AttentionInput, spec: &AttentionSpec) -> bool {
    let one_size = spec.value_dim == spec.head_dim && input.views().iter().all(|v| v.stride() == input.q.stride());
    let unbounded = spec.causal && spec.window.is_none() && spec.soft_cap.is_none();
    one_size && unbounded && input.is_self_attention()
}

fn shape(input: &AttentionInput, spec: &AttentionSpec) -> AttentionShape {
    AttentionShape {
        dtype: input.q.matrix.dtype(),
        batch: input.batch,
        heads: spec.heads,
        kv_heads: spec.kv_heads,
        seq: input.query_len(),
        documents: input.cu_seqlens.map_or(0, |at| at.len() - 1),
        head_dim: spec.head_dim,
        window: spec.window.filter(|&window| window < input.query_len()).unwrap_or(0),
        capped: spec.soft_cap.is_some(),
        q_stride: input.q.stride(),
        k_stride: input.k.stride(),
        v_stride: input.v.stride(),
        o_stride: spec.output_width(),
        deterministic: spec.deterministic,
    }
}

fn factors(spec: &AttentionSpec) -> ScoreFactors {
    ScoreFactors { scale: spec.scale as f32, soft_cap: spec.soft_cap.unwrap_or(0.0) as f32 }
}

/// The boundaries of documents in the form that cuDNN reads.
struct Documents {
    lengths: Tensor,
    /// Offsets, I64, in elements: of fused rows, of rows of the output, and of rows with one value per head.
    offsets: [Tensor; 3],
}

impl Documents {
    fn new(gpu: &Arc<CudaDevice>, at: &Tensor, input: &AttentionInput, spec: &AttentionSpec) -> Result<Documents> {
        let documents = at.len() - 1;
        let vector = |words| Tensor::empty(at.device(), &[words], DType::I32);
        let mut lengths = vector(documents)?;
        let mut offsets = [vector(2 * at.len())?, vector(2 * at.len())?, vector(2 * at.len())?];
        let kernel = Kernel { source: &SOURCE, defines: launch::storage(DType::BF16)?, entry: "document_offsets" };
        let [fused, output, rows] = offsets.each_mut().map(|offsets| Arg::Ptr(offsets.device_ptr_mut()));
        let args = [
            Arg::Ptr(lengths.device_ptr_mut()),
            fused,
            output,
            rows,
            Arg::Ptr(at.device_ptr()),
            Arg::I32(documents as i32),
            Arg::I32(input.q.stride() as i32),
            Arg::I32(spec.output_width() as i32),
            Arg::I32(spec.heads as i32),
        ];
        // SAFETY: `at` and the offsets, of two words each, have an element more than there are documents, `lengths` one per document.
        unsafe { gpu.launch(&kernel, launch::elements(gpu, at.len()), BLOCK, 0, &args)? };
        Ok(Documents { lengths, offsets })
    }

    fn pointers(&self) -> DocumentPointers {
        let [fused, output, rows] = self.offsets.each_ref().map(Tensor::device_ptr);
        DocumentPointers { lengths: self.lengths.device_ptr(), fused, output, rows }
    }
}

/// Bytes for the static shared memory of a kernel.
const STATIC_BYTES: usize = 1024;

fn shared(gpu: &CudaDevice, floats: usize) -> Result<u32> {
    // The compiler loads four scores at a time, so their number is rounded up to a multiple of four. A launch that exceeds the default with
    // its static part raises the limit.
    let bytes = floats.next_multiple_of(4) * size_of::<f32>() + STATIC_BYTES;
    if bytes > Capability::find(gpu.capability())?.shared_bytes - STATIC_BYTES {
        return Err(Error::Value(format!(
            "attention: {floats} scores do not fit in shared memory; use bfloat16 and a head size that is a multiple of 8 up to 256, and \
             with packed documents up to 128"
        )));
    }
    Ok(bytes as u32)
}

/// A kernel, and the arguments that follow its own: sizes, documents and, in the general form, the rest of the spec.
struct Call {
    defines: Defines,
    args: Vec<Arg>,
}

impl Call {
    fn new(input: &AttentionInput, spec: &AttentionSpec) -> Result<Call> {
        let int = |value: usize| Arg::I32(value as i32);
        let mut args = vec![
            int(input.q.stride()),
            int(spec.output_width()),
            int(input.query_len()),
            int(spec.heads),
            int(spec.group()),
            int(spec.head_dim),
            Arg::F32(spec.scale as f32),
        ];
        args.extend(match input.cu_seqlens {
            Some(at) => [Arg::Ptr(at.device_ptr()), int(at.len() - 1)],
            None => [Arg::Ptr(0), Arg::I32(0)],
        });
        let dtype = input.q.matrix.dtype();
        let mut defines = launch::storage(dtype)?;
        if !is_plain(input, spec) {
            let general = |variant: &&Defines| variant[0] == defines[0] && variant.len() == 2;
            defines = VARIANTS.iter().find(general).expect("each storage type has a general form");
            args.extend([int(input.k.stride()), int(input.v.stride()), int(input.key_len()), int(spec.value_dim)]);
            args.extend([int(input.first_query), Arg::I32(spec.causal.into()), int(spec.window.unwrap_or(0))]);
            args.push(Arg::F32(spec.soft_cap.unwrap_or(0.0) as f32));
        }
        Ok(Call { defines, args })
    }

    fn kernel(&self, entry: &'static str) -> Kernel {
        Kernel { source: &SOURCE, defines: self.defines, entry }
    }

    /// `own` arguments of a kernel, and the common ones.
    fn args(&self, own: &[Arg]) -> Vec<Arg> {
        [own, &self.args].concat()
    }
}

fn grid(x: usize, heads: usize, batch: usize) -> [u32; 3] {
    [x as u32, heads as u32, batch as u32]
}

pub(super) fn attention(
    gpu: &Arc<CudaDevice>,
    backend: AttentionBackend,
    input: AttentionInput,
    spec: &AttentionSpec,
    o: &mut Tensor,
    lse: &mut Tensor,
) -> Result<()> {
    let [q, k, v] = input.views().map(|view| view.address());
    if backend == AttentionBackend::CuDnn {
        let found = input.cu_seqlens.map(|at| Documents::new(gpu, at, &input, spec)).transpose()?;
        let documents = found.as_ref().map(Documents::pointers).unwrap_or_default();
        let pointers = AttentionForward { q, k, v, o: o.device_ptr_mut(), lse: lse.device_ptr_mut(), documents };
        // SAFETY: the op has checked that the views, `o` and `lse` have the sizes of the shape; `AttentionInput` requires that documents lie
        // within it.
        return unsafe { gpu.attention_forward(&shape(&input, spec), factors(spec), &pointers) };
    }
    let call = Call::new(&input, spec)?;
    let args = call.args(&[o.device_ptr_mut(), lse.device_ptr_mut(), q, k, v].map(Arg::Ptr));
    let grid = grid(input.query_len(), spec.heads, input.batch);
    // SAFETY: as above; the kernel keeps documents within their sequence; shared memory holds one score per key.
    unsafe { gpu.launch(&call.kernel("attention"), grid, BLOCK, shared(gpu, input.key_len())?, &args) }
}

pub(super) fn attention_backward(
    gpu: &Arc<CudaDevice>,
    backend: AttentionBackend,
    [d_o, o, lse]: [&Tensor; 3],
    input: AttentionInput,
    spec: &AttentionSpec,
    gradients: &mut [Tensor],
) -> Result<()> {
    let [q, k, v] = input.views().map(|view| view.address());
    let mut views = input.views().into_iter().zip(input.matrix_of_views());
    let [dq, dk, dv] = std::array::from_fn(|_| {
        let (view, matrix) = views.next().expect("three views");
        let column = view.column * view.matrix.dtype().size();
        gradients[matrix].device_ptr_mut() + column as u64
    });
    if backend == AttentionBackend::CuDnn {
        let found = input.cu_seqlens.map(|at| Documents::new(gpu, at, &input, spec)).transpose()?;
        let documents = found.as_ref().map(Documents::pointers).unwrap_or_default();
        let (d_o, o, lse) = (d_o.device_ptr(), o.device_ptr(), lse.device_ptr());
        let pointers = AttentionBackward { forward: AttentionForward { q, k, v, o, lse, documents }, d_o, dq, dk, dv };
        // SAFETY: the op has checked that all tensors have the sizes of the shape; `AttentionInput` requires that documents lie within it.
        return unsafe { gpu.attention_backward(&shape(&input, spec), factors(spec), &pointers) };
    }
    let call = Call::new(&input, spec)?;
    let mut delta = lse.empty_like()?;
    let sizes = [spec.output_width(), input.query_len(), spec.heads, spec.value_dim].map(|size| Arg::I32(size as i32));
    let args = [&[delta.device_ptr_mut(), d_o.device_ptr(), o.device_ptr()].map(Arg::Ptr), sizes.as_slice()].concat();
    let of_queries = grid(input.query_len(), spec.heads, input.batch);
    // SAFETY: `d_o` and `o` have the sizes of the spec, `delta` the sizes of `lse`.
    unsafe { gpu.launch(&call.kernel("row_products"), of_queries, BLOCK, 0, &args)? };
    let read = [q, k, v, d_o.device_ptr(), lse.device_ptr(), delta.device_ptr()].map(Arg::Ptr);
    let args = call.args(&[&[Arg::Ptr(dq)], read.as_slice()].concat());
    let bytes = shared(gpu, input.key_len())?;
    // SAFETY: all sizes come from the spec and the input; shared memory holds one value per key.
    unsafe { gpu.launch(&call.kernel("attention_dq"), of_queries, BLOCK, bytes, &args)? };
    let args = call.args(&[&[Arg::Ptr(dk), Arg::Ptr(dv)], read.as_slice()].concat());
    let (of_keys, bytes) = (grid(input.key_len(), spec.kv_heads, input.batch), shared(gpu, 2 * input.query_len())?);
    // SAFETY: as above; shared memory holds two values per query.
    unsafe { gpu.launch(&call.kernel("attention_dkv"), of_keys, BLOCK, bytes, &args) }
}
