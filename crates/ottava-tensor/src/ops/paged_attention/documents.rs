//! Attention of whole documents with the bits of their tokens over a cache. Keys and values are first stored in a temporary cache, and the kernels of paged
//! attention read them there. These kernels are slower than kernels for whole documents, but support more types and sizes.

use super::{KvBlocks, PagedBatch, append_kv, cpu, cuda};
use crate::ops::attention::{Outputs, cache_refusal};
use crate::ops::attention_sink;
use crate::ops::dispatch::dispatch;
use crate::ops::{AttentionCase, AttentionInput, AttentionSpec};
use crate::{DType, Error, Result, Tensor};

/// The number of tokens of a block of the temporary cache.
const BLOCK_SIZE: usize = 32;

/// The documents of a batch as sequences, all of whose tokens are new.
struct Documents {
    starts: Tensor,
    lengths: Tensor,
    /// Zeros: no token is from an earlier pass.
    cached: Tensor,
    block_tables: Tensor,
    longest: usize,
}

impl Documents {
    /// Returns the documents of `input`. Document `d` begins at token `s` and has the blocks of `cache` from `s / BLOCK_SIZE + d` on.
    fn new(input: &AttentionInput, cache: &KvBlocks) -> Result<Documents> {
        let (device, longest) = (input.q.matrix.device(), input.query_len());
        let documents = documents_of(input);
        let of = |shape: &[usize]| Tensor::empty(device, shape, DType::I32);
        let (mut starts, mut lengths) = (of(&[documents + 1])?, of(&[documents])?);
        let mut block_tables = of(&[documents, longest.div_ceil(BLOCK_SIZE)])?;
        let cached = Tensor::zeros(device, &[documents], DType::I32)?;
        dispatch! { device,
            cpu => {
                let edges = match input.cu_seqlens {
                    Some(at) => at.to_vec::<i32>()?,
                    None => (0..=documents).map(|document| (document * longest) as i32).collect(),
                };
                let width = block_tables.shape()[1];
                for (document, table) in block_tables.host_mut::<i32>().chunks_mut(width).enumerate() {
                    let first = edges[document] as usize / BLOCK_SIZE + document;
                    table.iter_mut().enumerate().for_each(|(i, block)| *block = (first + i) as i32);
                }
                for (length, edges) in lengths.host_mut::<i32>().iter_mut().zip(edges.windows(2)) {
                    *length = edges[1] - edges[0];
                }
                starts.host_mut::<i32>().copy_from_slice(&edges);
            },
            gpu => {
                let tensors = [&mut starts, &mut lengths, &mut block_tables];
                cuda::document_blocks(gpu, tensors, input.cu_seqlens, longest, cache, input.q.matrix.dtype())?;
            },
        }
        Ok(Documents { starts, lengths, cached, block_tables, longest })
    }

    fn batch(&self) -> PagedBatch<'_> {
        let Documents { starts, lengths, cached, block_tables, longest } = self;
        PagedBatch { query_starts: starts, context_lens: lengths, cached_lens: cached, block_tables, max_new: *longest }
    }
}

/// Returns the maximum number of documents.
fn documents_of(input: &AttentionInput) -> usize {
    input.cu_seqlens.map_or(input.batch, |at| at.len() - 1)
}

/// Stores the keys and values of `input` in a cache in `dtype`. Returns queries, keys and values with the values of the cache, the cache and the documents.
fn store(input: &AttentionInput, spec: &AttentionSpec, dtype: DType) -> Result<(Tensor, KvBlocks, Documents)> {
    let matrix = input.q.matrix;
    let case = AttentionCase::of_input(input, spec);
    if let Some(reason) = cache_refusal(&case, dtype, matrix.device()) {
        return Err(Error::Value(format!("attention: {reason}")));
    }
    let blocks = matrix.shape()[0] / BLOCK_SIZE + documents_of(input);
    let mut cache = KvBlocks::new(matrix.device(), spec, blocks, BLOCK_SIZE, dtype)?;
    let documents = Documents::new(input, &cache)?;
    let mut qkv = matrix.duplicate()?;
    append_kv(&mut qkv, &mut cache, &documents.batch(), spec, None)?;
    Ok((qkv, cache, documents))
}

/// Computes attention of whole documents as of their tokens over a cache in `dtype`, into `outputs`.
pub(in crate::ops) fn attention_of_documents(
    input: &AttentionInput,
    spec: &AttentionSpec,
    dtype: DType,
    sinks: Option<&Tensor>,
    outputs: &mut Outputs,
) -> Result<()> {
    let (qkv, cache, documents) = store(input, spec, dtype)?;
    let batch = documents.batch();
    dispatch! { qkv.device(),
        cpu => {
            let Outputs { o, lse, .. } = outputs;
            cpu::paged_attention(&qkv, &cache, &batch, spec, None, o, Some(lse))?;
            if let Some(sinks) = sinks {
                attention_sink(o, lse, sinks)?;
            }
        },
        gpu => cuda::attention_of_documents(gpu, &qkv, &cache, &batch, spec, sinks, outputs)?,
    }
    Ok(())
}

/// Returns a copy of queries, keys and values, in which keys and values are rounded as in a cache in E4M3. Returns `None` if attention does not round them.
pub(in crate::ops) fn as_stored(input: &AttentionInput, spec: &AttentionSpec) -> Result<Option<Tensor>> {
    let codes = spec.kv_dtype.filter(|dtype| *dtype == DType::E4M3);
    codes.map(|dtype| store(input, spec, dtype).map(|(qkv, ..)| qkv)).transpose()
}
