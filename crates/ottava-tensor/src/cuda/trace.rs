//! The trace of a dry run. It has one line per call, and tests compare it with a recorded trace.
//!
//! A line has the kernel, its defines, its grid and its arguments, with addresses as offsets. `tests/promises/precision/golden_settings.rs` of
//! `ottava-train` compares the trace of a step in each setting with `tests/data/launches.txt.gz`. A changed launch is noticed without a GPU.
//!
//! `golden_settings.json` has a digest of the results of the same settings on the CPU.

use super::cublaslt::{GemmSpec, Major, ScaleMode};
use super::kernel::{Arg, Kernel};
use super::lock::lock;
use std::sync::Mutex;

/// The lines of the trace in progress. The value is `None` outside a trace.
#[derive(Default)]
pub(super) struct Trace(Mutex<Option<Vec<String>>>);

impl Trace {
    pub(super) fn start(&self) {
        *lock(&self.0) = Some(Vec::new());
    }

    pub(super) fn take(&self) -> Vec<String> {
        lock(&self.0).take().unwrap_or_default()
    }

    pub(super) fn add(&self, line: impl FnOnce() -> String) {
        if let Some(lines) = &mut *lock(&self.0) {
            lines.push(line());
        }
    }
}

/// Describes a launch in one line. `offset` returns the distance of an address from the start of its allocation.
pub(super) fn describe_kernel(
    kernel: &Kernel,
    [x, y, z]: [u32; 3],
    [cluster, block]: [u32; 2],
    offset: impl Fn(u64) -> Option<u64>,
) -> String {
    let place = |address| match offset(address) {
        Some(0) => "*".to_string(),
        Some(offset) => format!("*+{offset}"),
        None => "host".to_string(),
    };
    let describe = |arg: &Arg| match *arg {
        Arg::Ptr(0) => "null".to_string(),
        Arg::Ptr(address) => place(address),
        Arg::I32(value) => value.to_string(),
        Arg::U32(value) => value.to_string(),
        Arg::I64(value) => value.to_string(),
        Arg::U64(value) => value.to_string(),
        Arg::F32(value) => format!("{value:?}f"),
        Arg::Map(map) => format!("{} [{} x {} bytes]", place(map.address), map.dims()[0].size, map.row_bytes),
    };
    let defines: Vec<_> = kernel.defines.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let args: Vec<_> = kernel.args.iter().map(describe).collect();
    let cluster = if cluster > 1 { format!(" in {cluster}") } else { String::new() };
    format!("{}({}) <{x},{y},{z}{cluster};{block}> [{}]", kernel.entry, defines.join(" "), args.join(" "))
}

/// Describes a product in one line.
pub(super) fn describe_gemm(spec: &GemmSpec) -> String {
    let GemmSpec { m, n, k, a, b, out, a_layout, b_layout, scale, fast_accumulation, accumulate, .. } = spec;
    let order = |layout: &Major| if *layout == Major::K { "" } else { "^T" };
    let scale = match scale {
        ScaleMode::None => String::new(),
        scale => format!(" {scale:?}"),
    };
    let (fast, plus) = (if *fast_accumulation { " fast" } else { "" }, if *accumulate { "+=" } else { "=" });
    format!("gemm {m}x{n}x{k} {out:?} {plus} {a:?}{} {b:?}{}{scale}{fast}", order(a_layout), order(b_layout))
}
