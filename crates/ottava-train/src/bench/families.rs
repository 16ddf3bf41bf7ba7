//! The time of a step, by the use of its calls.

use ottava_tensor::DType;
use ottava_tensor::cuda::{Call, GemmSpec, HOST_TRANSFER, Major};
use serde::Serialize;

/// The time of all calls with the same use.
#[derive(Clone, Debug, Serialize)]
pub struct FamilyTime {
    /// The name of the use.
    pub family: &'static str,
    /// The milliseconds per step.
    pub milliseconds: f64,
}

/// The uses in the order of a table, with prefixes of the names of their kernels. Only the time for which compute waits for collectives and for
/// transfers to the host is counted.
const FAMILIES: [(&str, &[&str]); 26] = [
    ("linears, fprop", &[]),
    ("linears, dgrad", &[]),
    ("linears, fprop and dgrad", &[]),
    ("linears, wgrad", &[]),
    ("experts, products", &["grouped_", "wgmma"]),
    ("routing", &["route", "add_counts", "count_slots", "place_slots", "gather", "combine", "weight_gradient"]),
    ("head and loss", &["cross_entropy", "divergence", "entropy", "cap_logits", "label_loss"]),
    ("attention", &["attention", "row_products", "output_gate"]),
    (
        "recurrent layers",
        &["causal_conv", "chunk_table", "delta_", "gated_delta_rule", "gated_norm", "ssd", "wide_gated_norm"],
    ),
    ("norms", &["rmsnorm", "head_norm", "projection_"]),
    ("SwiGLU", &["swiglu", "xielu"]),
    ("RoPE", &["rope"]),
    (
        "casts and scales",
        &["quantize", "dequantize", "amax", "take_scale", "delayed_scaling", "transpose", "cast", "hadamard"],
    ),
    ("saved activations", &["compress", "decompress"]),
    ("scales of columns", &["column_amaxes", "scales_of_amaxes", "multiply_columns", "add_unscaled_columns"]),
    ("biases", &["add_bias", "partial_sums", "add_partial_sums"]),
    ("embedding", &["embedding", "add_noise"]),
    ("gradient norm", &["sum_of_squares", "root_of_sum"]),
    ("optimizer", &["adamw", "momentum", "normalize", "polynomial", "descend", "ema"]),
    ("gradients in FP8", &["encode_gradients", "decode_gradients", "relative_error"]),
    ("other kernels", &[]),
    ("exposed gathers", &["ncclAllGather", "copies of a gather"]),
    (
        "exposed reductions",
        &["ncclReduceScatter", "ncclSend and ncclRecv", "copies of a reduce-scatter", "copies of an exchange"],
    ),
    ("exposed all-to-alls", &["copies of an all-to-all"]),
    ("exposed all-reduces", &["ncclAllReduce"]),
    ("exposed host transfers", &[HOST_TRANSFER]),
];

/// Sums the milliseconds of `calls` by use, for a step of `tokens` tokens that took `step` milliseconds. The last entry is the rest of the step.
pub fn by_family(calls: &[(Call, f64)], step: f64, tokens: usize, vocabulary: usize) -> Vec<FamilyTime> {
    let mut times: Vec<_> = FAMILIES.iter().map(|&(family, _)| FamilyTime { family, milliseconds: 0.0 }).collect();
    let hybrid = calls.iter().any(|(call, _)| matches!(call, Call::Gemm(spec) if reads_e5m2(spec)));
    // A step ends with the gradient norm and the update. In the update, products and norms belong to Muon.
    let mut updates = false;
    for (call, milliseconds) in calls {
        let family = match family(call, tokens, vocabulary, hybrid) {
            "gradient norm" if updates => "optimizer",
            _ if updates && matches!(call, Call::Gemm(_)) => "optimizer",
            family => family,
        };
        updates |= matches!(call, Call::Kernel("root_of_sum"));
        let time = times.iter_mut().find(|time| time.family == family).expect("families are those of the table");
        time.milliseconds += milliseconds;
    }
    let between = step - times.iter().map(|time| time.milliseconds).sum::<f64>();
    times.push(FamilyTime { family: "copies, fills and gaps", milliseconds: between });
    times.retain(|time| time.milliseconds > 0.0);
    times
}

fn family(call: &Call, tokens: usize, vocabulary: usize, hybrid: bool) -> &'static str {
    match call {
        Call::Kernel(name) | Call::Wait(name) => {
            let belongs = |(_, kernels): &&(_, &[&str])| kernels.iter().any(|kernel| name.starts_with(kernel));
            FAMILIES.iter().find(belongs).map_or("other kernels", |(family, _)| family)
        }
        Call::Gemm(spec) => product(spec, tokens, vocabulary, hybrid),
        Call::AttentionForward | Call::AttentionBackward => "attention",
    }
}

/// Returns the product of a linear layer, or of the head, to which a specification belongs. All FP8 operands have the same layout, so sizes and types
/// decide. In a `hybrid` step, gradients are E5M2. In other steps, fprop and dgrad are counted together.
fn product(spec: &GemmSpec, tokens: usize, vocabulary: usize, hybrid: bool) -> &'static str {
    let padded = |n: usize| n.next_multiple_of(16);
    let one_of = |size: usize| [spec.m, spec.n, spec.k].contains(&size);
    match (spec.a_layout, spec.b_layout) {
        _ if one_of(vocabulary) || one_of(padded(vocabulary)) => "head and loss",
        (Major::MN, Major::MN) => "linears, wgrad",
        (Major::K, Major::MN) => "linears, dgrad",
        _ if !spec.a.is_fp8() => "linears, fprop",
        _ if spec.k == padded(tokens) && spec.m != padded(tokens) => "linears, wgrad",
        _ if reads_e5m2(spec) => "linears, dgrad",
        _ if hybrid => "linears, fprop",
        _ => "linears, fprop and dgrad",
    }
}

fn reads_e5m2(spec: &GemmSpec) -> bool {
    [spec.a, spec.b].contains(&DType::E5M2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ottava_tensor::DType::{BF16, E4M3, E5M2};

    #[test]
    fn products_are_told_apart() {
        let fp8 = |size, a| Call::Gemm(GemmSpec::contiguous(size, a, E4M3, BF16));
        let wide = GemmSpec::contiguous([96, 64, 32], BF16, BF16, BF16);
        let dgrad = Call::Gemm(GemmSpec { b_layout: Major::MN, ..wide });
        let wgrad = Call::Gemm(GemmSpec { a_layout: Major::MN, b_layout: Major::MN, ..wide });
        let calls = [
            (fp8([96, 64, 32], E4M3), 1.0),
            (Call::Gemm(wide), 1.0),
            (fp8([96, 32, 64], E5M2), 4.0),
            (dgrad, 4.0),
            (fp8([64, 32, 96], E5M2), 16.0),
            (wgrad, 16.0),
            (Call::Gemm(GemmSpec::contiguous([96, 1000, 32], BF16, BF16, BF16)), 64.0),
            (Call::Kernel("cross_entropy"), 64.0),
            (Call::Kernel("wgmma"), 6.0),
            (Call::Kernel("wide_gated_norm"), 7.0),
            (Call::Kernel("ssd_scan"), 8.0),
            (Call::Kernel("a new one"), 128.0),
            (Call::Wait("ncclReduceScatter"), 3.0),
            (Call::Wait("ncclSend and ncclRecv"), 5.0),
            (Call::Kernel("sum_of_squares"), 2.0),
            (Call::Kernel("root_of_sum"), 1.0),
            (Call::Kernel("momentum"), 1.0),
            (Call::Kernel("root_of_sum"), 2.0),
            (Call::Gemm(wide), 4.0),
            (Call::Kernel("descend"), 8.0),
        ];
        let times = by_family(&calls, 500.0, 96, 1000);
        let times: Vec<_> = times.iter().map(|time| (time.family, time.milliseconds)).collect();
        let expected = [
            ("linears, fprop", 2.0),
            ("linears, dgrad", 8.0),
            ("linears, wgrad", 32.0),
            ("experts, products", 6.0),
            ("head and loss", 128.0),
            ("recurrent layers", 15.0),
            ("gradient norm", 3.0),
            ("optimizer", 15.0),
            ("other kernels", 128.0),
            ("exposed reductions", 8.0),
            ("copies, fills and gaps", 155.0),
        ];
        assert_eq!(times, expected);

        let times = by_family(&[(fp8([96, 64, 32], E4M3), 1.0), (fp8([64, 32, 96], E4M3), 2.0)], 3.0, 96, 1000);
        assert_eq!(
            times.iter().map(|time| time.family).collect::<Vec<_>>(),
            ["linears, fprop and dgrad", "linears, wgrad"]
        );
    }
}
