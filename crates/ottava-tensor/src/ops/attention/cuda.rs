use super::{AttentionBackend, AttentionLayout};
use crate::cuda::{
    Arg, AttentionBackward, AttentionForward, AttentionShape, CudaDevice, DEFAULT_SHARED_BYTES, DocumentPointers,
    Kernel,
};
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::{DType, Error, Result, Tensor};
use std::sync::Arc;

kernel_source!("attention");

/// Addresses of queries, keys and values in a fused buffer.
fn parts(base: u64, dtype: DType, l: AttentionLayout) -> [u64; 3] {
    let column = |heads: usize| base + (heads * l.head_dim * dtype.size()) as u64;
    [column(0), column(l.heads), column(l.heads + l.kv_heads)]
}

fn fused(l: AttentionLayout, cu_seqlens: Option<&Tensor>) -> AttentionShape {
    let shape = AttentionShape::fused([l.batch, l.seq_len], l.heads, l.kv_heads, l.head_dim);
    AttentionShape { deterministic: l.deterministic, documents: cu_seqlens.map_or(0, |at| at.len() - 1), ..shape }
}

/// What cuDNN reads of documents.
struct Documents {
    lengths: Tensor,
    /// I64, in elements: of fused rows, of rows of the output, and of rows with a value per head.
    offsets: [Tensor; 3],
}

impl Documents {
    fn new(gpu: &Arc<CudaDevice>, at: &Tensor, l: AttentionLayout) -> Result<Documents> {
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
            Arg::I32(l.qkv_width() as i32),
            Arg::I32(l.output_width() as i32),
            Arg::I32(l.heads as i32),
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

fn shared(floats: usize) -> Result<u32> {
    // The compiler loads four scores at a time, so their number is rounded up to a multiple of four.
    let bytes = floats.next_multiple_of(4) * size_of::<f32>();
    if bytes > DEFAULT_SHARED_BYTES {
        return Err(Error::Value(format!(
            "attention: {floats} scores do not fit in shared memory; use bfloat16 and a head size that is a multiple of 8 up to 128"
        )));
    }
    Ok(bytes as u32)
}

/// The last two arguments of a kernel: the boundaries of documents, and how many documents there may be.
fn documents(cu_seqlens: Option<&Tensor>) -> [Arg; 2] {
    match cu_seqlens {
        Some(at) => [Arg::Ptr(at.device_ptr()), Arg::I32(at.len() as i32 - 1)],
        None => [Arg::Ptr(0), Arg::I32(0)],
    }
}

fn grid(x: usize, heads: usize, batch: usize) -> [u32; 3] {
    [x as u32, heads as u32, batch as u32]
}

pub(super) fn attention(
    gpu: &Arc<CudaDevice>,
    qkv: &Tensor,
    cu_seqlens: Option<&Tensor>,
    l: AttentionLayout,
    o: &mut Tensor,
    lse: &mut Tensor,
) -> Result<()> {
    let [q, k, v] = parts(qkv.device_ptr(), qkv.dtype(), l);
    if l.backend(qkv, cu_seqlens) == AttentionBackend::CuDnn {
        let found = cu_seqlens.map(|at| Documents::new(gpu, at, l)).transpose()?;
        let documents = found.as_ref().map(Documents::pointers).unwrap_or_default();
        let pointers = AttentionForward { q, k, v, o: o.device_ptr_mut(), lse: lse.device_ptr_mut(), documents };
        // SAFETY: the op has checked that `qkv`, `o` and `lse` have the sizes of the layout, and documents lie within it.
        return unsafe { gpu.attention_forward(&fused(l, cu_seqlens), l.scale() as f32, &pointers) };
    }
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(qkv.dtype())?, entry: "attention" };
    let args = [
        Arg::Ptr(o.device_ptr_mut()),
        Arg::Ptr(lse.device_ptr_mut()),
        Arg::Ptr(q),
        Arg::Ptr(k),
        Arg::Ptr(v),
        Arg::I32(l.qkv_width() as i32),
        Arg::I32(l.output_width() as i32),
        Arg::I32(l.seq_len as i32),
        Arg::I32(l.heads as i32),
        Arg::I32((l.heads / l.kv_heads) as i32),
        Arg::I32(l.head_dim as i32),
        Arg::F32(l.scale() as f32),
    ];
    let args = [args.as_slice(), &documents(cu_seqlens)].concat();
    // SAFETY: as above; the kernel keeps documents within their sequence; shared memory holds one score per key.
    unsafe { gpu.launch(&kernel, grid(l.seq_len, l.heads, l.batch), BLOCK, shared(l.seq_len)?, &args) }
}

pub(super) fn attention_backward(
    gpu: &Arc<CudaDevice>,
    [d_o, qkv, o, lse]: [&Tensor; 4],
    cu_seqlens: Option<&Tensor>,
    l: AttentionLayout,
    dqkv: &mut Tensor,
) -> Result<()> {
    let [q, k, v] = parts(qkv.device_ptr(), qkv.dtype(), l);
    let [dq, dk, dv] = parts(dqkv.device_ptr_mut(), qkv.dtype(), l);
    if l.backend(qkv, cu_seqlens) == AttentionBackend::CuDnn {
        let found = cu_seqlens.map(|at| Documents::new(gpu, at, l)).transpose()?;
        let documents = found.as_ref().map(Documents::pointers).unwrap_or_default();
        let (d_o, o, lse) = (d_o.device_ptr(), o.device_ptr(), lse.device_ptr());
        let pointers = AttentionBackward { forward: AttentionForward { q, k, v, o, lse, documents }, d_o, dq, dk, dv };
        // SAFETY: the op has checked that all tensors have the sizes of the layout, and documents lie within it.
        return unsafe { gpu.attention_backward(&fused(l, cu_seqlens), l.scale() as f32, &pointers) };
    }
    if l.head_dim > 4 * BLOCK as usize {
        return Err(Error::Value(format!("attention: heads of {} are larger than 1024", l.head_dim)));
    }
    let kernel =
        |entry| -> Result<Kernel> { Ok(Kernel { source: &SOURCE, defines: launch::storage(qkv.dtype())?, entry }) };
    let mut delta = lse.empty_like()?;
    let args = [
        Arg::Ptr(delta.device_ptr_mut()),
        Arg::Ptr(d_o.device_ptr()),
        Arg::Ptr(o.device_ptr()),
        Arg::I32(l.output_width() as i32),
        Arg::I32(l.seq_len as i32),
        Arg::I32(l.heads as i32),
        Arg::I32(l.head_dim as i32),
    ];
    // SAFETY: `d_o` and `o` have the sizes of the layout, `delta` those of `lse`.
    unsafe { gpu.launch(&kernel("row_products")?, grid(l.seq_len, l.heads, l.batch), BLOCK, 0, &args)? };
    let common = [
        Arg::Ptr(q),
        Arg::Ptr(k),
        Arg::Ptr(v),
        Arg::Ptr(d_o.device_ptr()),
        Arg::Ptr(lse.device_ptr()),
        Arg::Ptr(delta.device_ptr()),
        Arg::I32(l.qkv_width() as i32),
        Arg::I32(l.output_width() as i32),
        Arg::I32(l.seq_len as i32),
        Arg::I32(l.heads as i32),
        Arg::I32((l.heads / l.kv_heads) as i32),
        Arg::I32(l.head_dim as i32),
        Arg::F32(l.scale() as f32),
    ];
    let documents = documents(cu_seqlens);
    let args = [&[Arg::Ptr(dq)], common.as_slice(), &documents].concat();
    // SAFETY: all sizes are those of the layout; shared memory holds one value per key.
    unsafe {
        gpu.launch(&kernel("attention_dq")?, grid(l.seq_len, l.heads, l.batch), BLOCK, shared(l.seq_len)?, &args)?
    };
    let args = [&[Arg::Ptr(dk), Arg::Ptr(dv)], common.as_slice(), &documents].concat();
    let bytes = shared(2 * l.seq_len)?;
    // SAFETY: as above; shared memory holds two values per query.
    unsafe { gpu.launch(&kernel("attention_dkv")?, grid(l.seq_len, l.kv_heads, l.batch), BLOCK, bytes, &args) }
}
