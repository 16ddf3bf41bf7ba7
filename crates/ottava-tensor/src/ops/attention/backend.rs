//! Chooses an attention backend by spec and device, from a table that attention and `ottava plan` read.

use super::ordered::Variant;
use super::{AttentionInput, AttentionSpec};
use crate::{Capability, DType, Device, Error, Feature, Result};

/// An implementation of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionBackend {
    /// The CPU reference.
    Cpu,
    /// cuDNN's fused kernels.
    CuDnn,
    /// Kernels of this crate that hold the scores of a query in shared memory.
    Plain,
    /// Kernels of this crate over a paged cache.
    Paged,
}

/// Where keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeySource {
    /// In one tensor with the queries, in the same rows.
    Fused,
    /// In other tensors than the queries, for the same tokens.
    Separate,
    /// In other tensors than the queries, for other tokens.
    OtherTokens,
    /// In a paged cache.
    Cache,
}

/// The properties of a call of attention that determine its backend.
#[derive(Clone, Copy, Debug)]
pub struct AttentionCase<'a> {
    /// The attention that is computed.
    pub spec: &'a AttentionSpec,
    /// The type of the queries.
    pub dtype: DType,
    /// Whether the call has boundaries of documents.
    pub documents: bool,
    /// Where keys and values are stored.
    pub keys: KeySource,
    /// Whether all rows and first heads begin at multiples of eight elements. Also true if head sizes are not multiples of eight.
    pub is_aligned: bool,
}

impl<'a> AttentionCase<'a> {
    /// Returns the case of queries, keys and values in one tensor, with or without `documents`.
    pub fn fused(spec: &'a AttentionSpec, dtype: DType, documents: bool) -> AttentionCase<'a> {
        AttentionCase { spec, dtype, documents, keys: KeySource::Fused, is_aligned: true }
    }

    /// Returns the case of queries in `dtype` over a paged cache.
    pub fn cache(spec: &'a AttentionSpec, dtype: DType) -> AttentionCase<'a> {
        AttentionCase { keys: KeySource::Cache, ..AttentionCase::fused(spec, dtype, false) }
    }

    pub(in crate::ops) fn of_input(input: &AttentionInput, spec: &'a AttentionSpec) -> AttentionCase<'a> {
        let keys = match input.matrices().len() {
            _ if !input.is_self_attention() => KeySource::OtherTokens,
            1 => KeySource::Fused,
            _ => KeySource::Separate,
        };
        let is_aligned = input.views().iter().all(|view| (view.column | view.stride()).is_multiple_of(8));
        let is_aligned = is_aligned || !spec.head_dim.is_multiple_of(8);
        let documents = input.cu_seqlens.is_some();
        AttentionCase { keys, is_aligned, ..AttentionCase::fused(spec, input.q.matrix.dtype(), documents) }
    }

    fn has_differing_values(&self) -> bool {
        self.spec.value_dim != self.spec.head_dim
    }
}

/// A condition of a backend on the cases that it supports.
struct Condition {
    /// If set, the condition applies only to GPUs without this feature; otherwise to all devices.
    without: Option<Feature>,
    /// What the backend supports, as the object of the verb "supports".
    takes: &'static str,
    /// Describes what an unsupported case has instead. Returns `None` if the case meets the condition.
    instead: fn(&AttentionCase) -> Option<String>,
}

const HALVES: Condition = Condition {
    without: None,
    takes: "float16 and bfloat16",
    instead: |case| (!matches!(case.dtype, DType::F16 | DType::BF16)).then(|| case.dtype.to_string()),
};
const STORAGE: Condition = Condition {
    without: None,
    takes: "float32, float16 and bfloat16",
    instead: |case| (case.dtype == DType::F64).then(|| case.dtype.to_string()),
};
const ONE_HEAD_SIZE: Condition = Condition {
    without: None,
    takes: "values of the size of keys",
    instead: |case| {
        let AttentionSpec { head_dim, value_dim, .. } = *case.spec;
        case.has_differing_values().then(|| format!("values of {value_dim} beside keys of {head_dim}"))
    },
};
// With other head sizes above 128, the largest errors of gradients are three times as large.
const EIGHTS_TO_256: Condition = Condition {
    without: None,
    takes: "heads of a multiple of 8 up to 128, or of 16 up to 256",
    instead: |case| {
        let dim = case.spec.head_dim;
        let takes = dim.is_multiple_of(if dim > 128 { 16 } else { 8 }) && dim <= 256;
        (!takes).then(|| format!("heads of {dim}"))
    },
};
// cuDNN has kernels for larger heads, windows and soft caps only for Hopper.
const TO_128: Condition = Condition {
    without: Some(Feature::Wgmma),
    takes: "heads of up to 128 on this GPU",
    instead: |case| (case.spec.head_dim > 128).then(|| format!("heads of {}", case.spec.head_dim)),
};
const WHOLE_CONTEXT: Condition = Condition {
    without: Some(Feature::Wgmma),
    takes: "whole contexts on this GPU",
    instead: |case| case.spec.window.map(|window| format!("a window of {window} tokens")),
};
const UNCAPPED: Condition = Condition {
    without: Some(Feature::Wgmma),
    takes: "unbounded scores on this GPU",
    instead: |case| case.spec.soft_cap.map(|cap| format!("a soft cap of {cap}")),
};
const TO_512: Condition = Condition {
    without: None,
    takes: "heads of up to 512",
    instead: |case| (case.spec.head_dim > 512).then(|| format!("heads of {}", case.spec.head_dim)),
};
const TO_1024: Condition = Condition {
    without: None,
    takes: "heads of up to 1024",
    instead: |case| {
        let largest = case.spec.head_dim.max(case.spec.value_dim);
        (largest > 1024).then(|| format!("heads of {largest}"))
    },
};
const CAUSAL: Condition = Condition {
    without: None,
    takes: "a causal mask",
    instead: |case| (!case.spec.causal).then(|| "attention to later tokens".into()),
};
// Windows to both sides have not been compared with the CPU in cuDNN.
const ONE_SIDED_WINDOW: Condition = Condition {
    without: None,
    takes: "windows with a causal mask",
    instead: |case| {
        let window = case.spec.window.filter(|_| !case.spec.causal)?;
        Some(format!("a window of {window} tokens to each side"))
    },
};
// Without a mask, boundaries or a window, the graph has no scalar of minus infinity, and cuDNN 9.14 rejects calls that pass one.
const MASKED: Condition = Condition {
    without: None,
    takes: "a causal mask or boundaries of documents",
    instead: |case| (!case.spec.causal && !case.documents).then(|| "attention to all tokens of a sequence".into()),
};
const SAME_TOKENS: Condition = Condition {
    without: None,
    takes: "queries and keys of the same tokens",
    instead: |case| (case.keys == KeySource::OtherTokens).then(|| "keys of other tokens".into()),
};
const ALIGNED: Condition = Condition {
    without: None,
    takes: "rows and heads that begin at multiples of 16 bytes",
    instead: |case| (!case.is_aligned).then(|| "other offsets".into()),
};
// With other head sizes, cuDNN 9.14 returns wrong gradients; with heads of 256, it returns NaN.
const DOCUMENTS_OF_SIXTEENS: Condition = Condition {
    without: None,
    takes: "documents with heads of a multiple of 16 up to 128",
    instead: |case| {
        let dim = case.spec.head_dim;
        (case.documents && (!dim.is_multiple_of(16) || dim > 128)).then(|| format!("heads of {dim}"))
    },
};
// With deterministic gradients, cuDNN would allocate for each document the scores of a whole sequence.
const DOCUMENTS_ARE_ATOMIC: Condition = Condition {
    without: None,
    takes: "documents with `deterministic = false`",
    instead: |case| (case.documents && case.spec.deterministic).then(|| "`true`".into()),
};
const DOCUMENTS_ARE_FUSED: Condition = Condition {
    without: None,
    takes: "documents with queries, keys and values in one tensor",
    instead: |case| (case.documents && case.keys != KeySource::Fused).then(|| "in several".into()),
};

/// A row of the table.
struct Row {
    backend: AttentionBackend,
    name: &'static str,
    on_gpu: bool,
    /// Whether keys and values are in a paged cache. If not, they are in rows.
    cache: bool,
    conditions: &'static [Condition],
}

/// The backends. For each device, the fastest comes first.
const TABLE: &[Row] = &[
    Row {
        backend: AttentionBackend::CuDnn,
        name: "cuDNN",
        on_gpu: true,
        cache: false,
        conditions: &[
            HALVES,
            EIGHTS_TO_256,
            TO_128,
            ONE_HEAD_SIZE,
            ONE_SIDED_WINDOW,
            MASKED,
            WHOLE_CONTEXT,
            UNCAPPED,
            SAME_TOKENS,
            ALIGNED,
            DOCUMENTS_OF_SIXTEENS,
            DOCUMENTS_ARE_ATOMIC,
            DOCUMENTS_ARE_FUSED,
        ],
    },
    Row {
        backend: AttentionBackend::Plain,
        name: "the plain kernel",
        on_gpu: true,
        cache: false,
        conditions: &[STORAGE, TO_1024],
    },
    Row {
        backend: AttentionBackend::Paged,
        name: "the paged kernel",
        on_gpu: true,
        cache: true,
        conditions: &[STORAGE, TO_512, ONE_HEAD_SIZE, CAUSAL],
    },
    Row {
        backend: AttentionBackend::Cpu,
        name: "the reference on the CPU",
        on_gpu: false,
        cache: false,
        conditions: &[],
    },
    Row {
        backend: AttentionBackend::Cpu,
        name: "the reference on the CPU",
        on_gpu: false,
        cache: true,
        conditions: &[ONE_HEAD_SIZE, CAUSAL],
    },
];

impl Row {
    /// Returns a sentence about the first condition that `case` does not meet.
    fn refusal(&self, case: &AttentionCase, device: &Device) -> Result<Option<String>> {
        for Condition { without, takes, instead } in self.conditions {
            let applies = match (without, device) {
                (Some(feature), Device::Cuda(gpu)) => !Capability::find(gpu.capability())?.features.contains(feature),
                _ => true,
            };
            if let Some(instead) = instead(case).filter(|_| applies) {
                return Ok(Some(format!("{} supports {takes}, not {instead}", self.name)));
            }
        }
        Ok(None)
    }
}

/// The backend of a case, with the reasons for the choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChosenBackend {
    /// The backend.
    pub backend: AttentionBackend,
    /// The name of the backend in messages.
    pub name: &'static str,
    /// A sentence for each faster backend, with the condition that the case does not meet.
    pub because: Vec<String>,
}

impl AttentionBackend {
    /// Returns why forward of the case on `device` has no kernel in the order of sums of paged attention, as a clause. On a CPU, the sums of attention do
    /// not depend on the batch.
    pub fn order_refusal(case: &AttentionCase, device: &Device) -> Option<String> {
        let Device::Cuda(gpu) = device else { return None };
        match Variant::of(case) {
            Some(_) if Variant::runs_on(gpu) && case.spec.kv_dtype.is_none() => None,
            _ => cache_refusal(case, case.spec.kv_dtype.unwrap_or(case.dtype), device),
        }
    }

    /// Returns the fastest backend of `device` that supports `case`.
    ///
    /// Errors with [`Error::Value`] if no backend supports the case. The message has the unmet condition of each backend.
    pub fn choose(device: &Device, case: &AttentionCase) -> Result<ChosenBackend> {
        let on_gpu = matches!(device, Device::Cuda(_));
        let mut because = Vec::new();
        for row in TABLE.iter().filter(|row| row.on_gpu == on_gpu && row.cache == (case.keys == KeySource::Cache)) {
            match row.refusal(case, device)? {
                None => return Ok(ChosenBackend { backend: row.backend, name: row.name, because }),
                Some(refusal) => because.push(refusal),
            }
        }
        Err(Error::Value(format!("attention: no backend on {device} serves this model: {}", because.join("; "))))
    }
}

/// Returns why the attention of documents over a cache in `dtype` does not support a case, as a clause. A CPU supports all self-attention.
pub(in crate::ops) fn cache_refusal(case: &AttentionCase, dtype: DType, device: &Device) -> Option<String> {
    let AttentionSpec { head_dim, value_dim, causal, .. } = *case.spec;
    let is_gpu = matches!(device, Device::Cuda(_));
    let has_halves = matches!(case.dtype, DType::F16 | DType::BF16) && (dtype == case.dtype || dtype == DType::E4M3);
    if !causal || case.keys != KeySource::Fused {
        return Some("attention in the order of a cache is causal, with keys and values of its own layer".into());
    }
    if value_dim != head_dim || is_gpu && (!head_dim.is_multiple_of(16) || head_dim > 256) {
        return Some(format!(
            "attention in the order of a cache has heads of a multiple of 16 up to 256, with values of the same size, not {}",
            case.spec
        ));
    }
    (is_gpu && !has_halves).then(|| {
        format!(
            "attention in the order of a cache is in float16 or bfloat16 on a GPU, not in {} over {dtype}",
            case.dtype
        )
    })
}
