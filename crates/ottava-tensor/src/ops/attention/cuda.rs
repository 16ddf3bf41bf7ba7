use super::{AttentionBackend, AttentionInput, AttentionSpec};
use crate::cuda::{AttentionBackward, AttentionForward, AttentionShape, CudaDevice, DocumentPointers, ScoreFactors};
use crate::ops::declaration::{Address, AddressMut, kernels};
use crate::ops::launch::{self, BLOCK, Defines};
use crate::{Capability, DType, Error, Result, Tensor};
use std::sync::Arc;

kernels! {
    static SOURCE = { file: "attention", variants: VARIANTS };
    kernel attention(
        o: *mut X, lse: *mut f32, q: *const X, k: *const X, v: *const X,
        stride: i32, o_stride: i32, seq_len: i32, heads: i32, group: i32, dim: i32, scale: f32, cu_seqlens: *const i32, documents: i32,
        #[GENERAL] k_stride: i32, #[GENERAL] v_stride: i32, #[GENERAL] key_len: i32, #[GENERAL] value_dim: i32,
        #[GENERAL] first_query: i32, #[GENERAL] causal: i32, #[GENERAL] window: i32, #[GENERAL] soft_cap: f32
    );
    kernel row_products(delta: *mut f32, d_o: *const X, o: *const X, o_stride: i32, seq_len: i32, heads: i32, dim: i32);
    kernel attention_dq(
        dq: *mut X, q: *const X, k: *const X, v: *const X, d_o: *const X, lse: *const f32, delta: *const f32,
        stride: i32, o_stride: i32, seq_len: i32, heads: i32, group: i32, dim: i32, scale: f32, cu_seqlens: *const i32, documents: i32,
        #[GENERAL] k_stride: i32, #[GENERAL] v_stride: i32, #[GENERAL] key_len: i32, #[GENERAL] value_dim: i32,
        #[GENERAL] first_query: i32, #[GENERAL] causal: i32, #[GENERAL] window: i32, #[GENERAL] soft_cap: f32
    );
    kernel attention_dkv(
        dk: *mut X, dv: *mut X, q: *const X, k: *const X, v: *const X, d_o: *const X, lse: *const f32, delta: *const f32,
        stride: i32, o_stride: i32, seq_len: i32, heads: i32, group: i32, dim: i32, scale: f32, cu_seqlens: *const i32, documents: i32,
        #[GENERAL] k_stride: i32, #[GENERAL] v_stride: i32, #[GENERAL] key_len: i32, #[GENERAL] value_dim: i32,
        #[GENERAL] first_query: i32, #[GENERAL] causal: i32, #[GENERAL] window: i32, #[GENERAL] soft_cap: f32
    );
    kernel document_offsets(
        lengths: *mut i32, of_fused: *mut i64, of_output: *mut i64, of_rows: *mut i64, at: *const i32, documents: i32, fused: i32,
        output: i32, heads: i32
    );
}

/// The storage types: first for fused queries, keys and values with a causal mask, then with `GENERAL` for all specs.
const VARIANTS: &[Defines] = &[
    &[("X", "f32")],
    &[("X", "f16")],
    &[("X", "bf16")],
    &[("X", "f32"), ("GENERAL", "1")],
    &[("X", "f16"), ("GENERAL", "1")],
    &[("X", "bf16"), ("GENERAL", "1")],
];

/// Returns whether the kernels without `GENERAL` support a call.
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
        causal: spec.causal,
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
    /// The offsets of documents, I64, in elements: in fused rows, in rows of the output, and in rows with one value per head.
    offsets: [Tensor; 3],
}

impl Documents {
    fn new(gpu: &Arc<CudaDevice>, at: &Tensor, input: &AttentionInput, spec: &AttentionSpec) -> Result<Documents> {
        let documents = at.len() - 1;
        let vector = |words| Tensor::empty(at.device(), &[words], DType::I32);
        let mut lengths = vector(documents)?;
        let mut offsets = [vector(2 * at.len())?, vector(2 * at.len())?, vector(2 * at.len())?];
        let [fused, output, rows] = offsets.each_mut();
        let (stride, width) = (input.q.stride(), spec.output_width());
        let entry =
            kernel::document_offsets(&mut lengths, fused, output, rows, at, documents, stride, width, spec.heads);
        let kernel = SOURCE.kernel(launch::storage(DType::BF16)?, entry);
        // SAFETY: `at` and the offsets (two words each) have one element more than there are documents; `lengths` has one per document.
        unsafe { gpu.launch(&kernel, launch::elements(gpu, at.len()), BLOCK, 0)? };
        Ok(Documents { lengths, offsets })
    }

    fn pointers(&self) -> DocumentPointers {
        let [fused, output, rows] = self.offsets.each_ref().map(Tensor::device_ptr);
        DocumentPointers { lengths: self.lengths.device_ptr(), fused, output, rows }
    }
}

/// The number of bytes that are reserved for the static shared memory of a kernel.
const STATIC_BYTES: usize = 1024;

fn shared(gpu: &CudaDevice, floats: usize) -> Result<u32> {
    // The compiler loads four scores at a time, so the number of scores is rounded up to a multiple of four. If a launch with its static part exceeds
    // the default limit, it raises the limit.
    let bytes = floats.next_multiple_of(4) * size_of::<f32>() + STATIC_BYTES;
    if bytes > Capability::find(gpu.capability())?.shared_bytes - STATIC_BYTES {
        return Err(Error::Value(format!(
            "attention: {floats} scores do not fit in shared memory; use bfloat16 and a head size that is a multiple of 8 up to 256, and \
             with packed documents up to 128"
        )));
    }
    Ok(bytes as u32)
}

/// The variant of a call, and the arguments that all kernels have: sizes, documents and, with `GENERAL`, the rest of the spec.
#[derive(Clone, Copy)]
struct Call<'a> {
    defines: Defines,
    /// The stride of queries, the stride of the output, the number of queries, heads, heads per key head, and the head size.
    sizes: [usize; 6],
    scale: f64,
    cu_seqlens: Option<&'a Tensor>,
    /// The stride of keys, the stride of values, the number of keys, the size of a value, the first query, whether the mask is causal, and the
    /// window.
    general: [Option<usize>; 7],
    soft_cap: Option<f64>,
}

impl<'a> Call<'a> {
    fn new(input: &AttentionInput<'a>, spec: &AttentionSpec) -> Result<Call<'a>> {
        let mut defines = launch::storage(input.q.matrix.dtype())?;
        let is_general = !is_plain(input, spec);
        if is_general {
            let general = |variant: &&Defines| variant[0] == defines[0] && variant.len() == 2;
            defines = VARIANTS.iter().find(general).expect("each storage type has a general form");
        }
        let (strides, keys) = ([input.k.stride(), input.v.stride()], [input.key_len(), spec.value_dim]);
        let mask = [input.first_query, spec.causal.into(), spec.window.unwrap_or(0)];
        let general = [strides[0], strides[1], keys[0], keys[1], mask[0], mask[1], mask[2]];
        Ok(Call {
            defines,
            sizes: [input.q.stride(), spec.output_width(), input.query_len(), spec.heads, spec.group(), spec.head_dim],
            scale: spec.scale,
            cu_seqlens: input.cu_seqlens,
            general: general.map(|size| is_general.then_some(size)),
            soft_cap: is_general.then(|| spec.soft_cap.unwrap_or(0.0)),
        })
    }
}

/// Returns the kernel of a call. `own` are the arguments that only this kernel has.
macro_rules! kernel_of {
    ($call:expr, $kernel:ident($($own:expr),+)) => {{
        let Call { defines, sizes, scale, cu_seqlens, general, soft_cap } = $call;
        let [stride, o_stride, seq_len, heads, group, dim] = sizes;
        let [k_stride, v_stride, key_len, value_dim, first_query, causal, window] = general;
        let documents = cu_seqlens.map_or(0, |at| at.len() - 1);
        let entry = kernel::$kernel(
            $($own,)+ stride, o_stride, seq_len, heads, group, dim, scale, cu_seqlens, documents, k_stride, v_stride, key_len, value_dim,
            first_query, causal, window, soft_cap,
        );
        SOURCE.kernel(defines, entry)
    }};
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
        // within this shape.
        return unsafe { gpu.attention_forward(&shape(&input, spec), factors(spec), &pointers) };
    }
    let call = Call::new(&input, spec)?;
    let [q, k, v] = [q, k, v].map(Address);
    let kernel = kernel_of!(call, attention(o, lse, q, k, v));
    let grid = grid(input.query_len(), spec.heads, input.batch);
    // SAFETY: as above; the kernel keeps documents within their sequence; shared memory holds one score per key.
    unsafe { gpu.launch(&kernel, grid, BLOCK, shared(gpu, input.key_len())?) }
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
        // SAFETY: the op has checked that all tensors have the sizes of the shape; `AttentionInput` requires that documents lie within this shape.
        return unsafe { gpu.attention_backward(&shape(&input, spec), factors(spec), &pointers) };
    }
    let call = Call::new(&input, spec)?;
    let mut delta = lse.empty_like()?;
    let (width, queries) = (spec.output_width(), input.query_len());
    let entry = kernel::row_products(&mut delta, d_o, o, width, queries, spec.heads, spec.value_dim);
    let kernel = SOURCE.kernel(call.defines, entry);
    let of_queries = grid(input.query_len(), spec.heads, input.batch);
    // SAFETY: `d_o` and `o` have the sizes of the spec, `delta` the sizes of `lse`.
    unsafe { gpu.launch(&kernel, of_queries, BLOCK, 0)? };
    let [q, k, v] = [q, k, v].map(Address);
    let kernel = kernel_of!(call, attention_dq(AddressMut(dq), q, k, v, d_o, lse, &delta));
    let bytes = shared(gpu, input.key_len())?;
    // SAFETY: all sizes come from the spec and the input; shared memory holds one value per key.
    unsafe { gpu.launch(&kernel, of_queries, BLOCK, bytes)? };
    let kernel = kernel_of!(call, attention_dkv(AddressMut(dk), AddressMut(dv), q, k, v, d_o, lse, &delta));
    let (of_keys, bytes) = (grid(input.key_len(), spec.kv_heads, input.batch), shared(gpu, 2 * input.query_len())?);
    // SAFETY: as above; shared memory holds two values per query.
    unsafe { gpu.launch(&kernel, of_keys, BLOCK, bytes) }
}
