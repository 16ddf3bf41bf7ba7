//! Tests of the table of backends.

use super::*;
use crate::Device;
use crate::cuda::GpuModel;

fn chosen(device: &Device, case: &AttentionCase) -> (AttentionBackend, String) {
    let chosen = AttentionBackend::choose(device, case).unwrap();
    (chosen.backend, chosen.because.join("; "))
}

/// Tests each condition of cuDNN by a case that meets all other conditions.
#[test]
fn what_cudnn_does_not_take_goes_to_the_plain_kernel_with_a_reason() {
    let gpu = Device::dry_gpu(GpuModel::h200());
    let usual = AttentionSpec::causal(8, 2, 128);
    fn fused(spec: &AttentionSpec, documents: bool) -> AttentionCase<'_> {
        AttentionCase::fused(spec, DType::BF16, documents)
    }
    for documents in [false, true] {
        assert_eq!(chosen(&gpu, &fused(&usual, documents)), (AttentionBackend::CuDnn, String::new()));
    }
    let with = |change: &dyn Fn(&mut AttentionSpec)| {
        let mut spec = usual;
        change(&mut spec);
        spec
    };
    let check = |case: AttentionCase, reason: &str| {
        assert_eq!(chosen(&gpu, &case), (AttentionBackend::Plain, format!("cuDNN supports {reason}")));
    };
    let both_sides = with(&|s| s.causal = false);
    assert_eq!(chosen(&gpu, &fused(&both_sides, true)), (AttentionBackend::CuDnn, String::new()));
    let of = |dtype| AttentionCase { dtype, ..fused(&usual, false) };
    assert_eq!(chosen(&gpu, &of(DType::F16)), (AttentionBackend::CuDnn, String::new()));
    check(of(DType::F32), "float16 and bfloat16, not float32");
    for (spec, documents, reason) in [
        (
            with(&|s| (s.head_dim, s.value_dim) = (264, 264)),
            false,
            "heads of a multiple of 8 up to 128, or of 16 up to 256, not heads of 264",
        ),
        (with(&|s| s.value_dim = 64), false, "values of the size of keys, not values of 64 beside keys of 128"),
        (both_sides, false, "a causal mask or boundaries of documents, not attention to all tokens of a sequence"),
        (
            with(&|s| (s.causal, s.window) = (false, Some(65))),
            false,
            "windows with a causal mask, not a window of 65 tokens to each side",
        ),
        (
            with(&|s| (s.head_dim, s.value_dim) = (8, 8)),
            true,
            "documents with heads of a multiple of 16 up to 128, not heads of 8",
        ),
        (with(&|s| s.deterministic = true), true, "documents with `deterministic = false`, not `true`"),
    ] {
        check(fused(&spec, documents), reason);
    }
    // cuDNN has fewer kernels for other GPUs.
    let bounded = [
        (with(&|s| (s.head_dim, s.value_dim) = (256, 256)), "heads of up to 128 on this GPU, not heads of 256"),
        (with(&|s| s.window = Some(512)), "whole contexts on this GPU, not a window of 512 tokens"),
        (with(&|s| s.soft_cap = Some(50.0)), "unbounded scores on this GPU, not a soft cap of 50"),
    ];
    let ada = Device::dry_gpu(GpuModel::named("L40S").unwrap());
    assert_eq!(chosen(&ada, &fused(&usual, false)).0, AttentionBackend::CuDnn);
    for (spec, reason) in bounded {
        assert_eq!(chosen(&gpu, &fused(&spec, false)), (AttentionBackend::CuDnn, String::new()));
        assert_eq!(chosen(&ada, &fused(&spec, false)), (AttentionBackend::Plain, format!("cuDNN supports {reason}")));
    }
    let of = |keys| AttentionCase { keys, ..fused(&usual, false) };
    assert_eq!(chosen(&gpu, &of(KeySource::Separate)), (AttentionBackend::CuDnn, String::new()));
    check(of(KeySource::OtherTokens), "queries and keys of the same tokens, not keys of other tokens");
    check(
        AttentionCase { documents: true, ..of(KeySource::Separate) },
        "documents with queries, keys and values in one tensor, not in several",
    );
    check(
        AttentionCase { is_aligned: false, ..of(KeySource::Separate) },
        "rows and heads that begin at multiples of 16 bytes, not other offsets",
    );
}

#[test]
fn a_spec_that_nothing_serves_is_an_error_that_says_why() {
    let gpu = Device::dry_gpu(GpuModel::h200());
    let large = AttentionSpec::causal(8, 2, 528);
    let error = |device: &Device, case: &AttentionCase| AttentionBackend::choose(device, case).unwrap_err().to_string();
    assert_eq!(
        error(&gpu, &AttentionCase::cache(&large, DType::BF16)),
        "attention: no backend on NVIDIA H200 serves this model: the paged kernel supports heads of up to 512, not heads of 528"
    );
    let huge = AttentionSpec::causal(1, 1, 2048);
    let message = error(&gpu, &AttentionCase::fused(&huge, DType::F32, false));
    assert!(
        message.contains(
            "cuDNN supports float16 and bfloat16, not float32; the plain kernel supports heads of up to 1024"
        ),
        "{message}"
    );
    // The reference supports everything except a cache whose values and keys differ in size.
    let (backend, because) = chosen(&Device::Cpu, &AttentionCase::cache(&large, DType::F64));
    assert_eq!((backend, because.as_str()), (AttentionBackend::Cpu, ""));
    let two_sizes = AttentionSpec { value_dim: 64, ..large };
    assert!(error(&Device::Cpu, &AttentionCase::cache(&two_sizes, DType::F32)).contains("values of the size of keys"));
    assert_eq!(chosen(&Device::Cpu, &AttentionCase::fused(&huge, DType::F64, true)).0, AttentionBackend::Cpu);
}
