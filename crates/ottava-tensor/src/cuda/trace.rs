//! The work that a dry run was given, one line per call, so that a test can compare it with a recorded one.

use super::driver::lock;
use super::{Arg, CudaDevice, GemmSpec, Kernel, Major, ScaleMode};
use std::sync::Mutex;

/// Lines since the trace began; `None` while there is no trace.
pub(super) type Trace = Mutex<Option<Vec<String>>>;

impl CudaDevice {
    /// Starts to note every kernel, product, attention, copy and fill that this device is given. Nothing outside a dry run.
    pub fn start_trace(&self) {
        if let Some(dry) = self.dry_gpu() {
            *lock(&dry.trace) = Some(Vec::new());
        }
    }

    /// Ends the trace, and returns its lines. A pointer is `*`, with its distance in bytes from the start of its allocation.
    pub fn take_trace(&self) -> Vec<String> {
        self.dry_gpu().and_then(|dry| lock(&dry.trace).take()).unwrap_or_default()
    }

    pub(super) fn trace(&self, line: impl FnOnce() -> String) {
        if let Some(dry) = self.dry_gpu()
            && let Some(lines) = &mut *lock(&dry.trace)
        {
            lines.push(line());
        }
    }

    pub(super) fn trace_kernel(&self, kernel: &Kernel, grid: [u32; 3], block: u32, args: &[Arg]) {
        self.trace(|| {
            let defines: Vec<_> = kernel.defines.iter().map(|(name, value)| format!("{name}={value}")).collect();
            let args: Vec<_> = args.iter().map(|arg| self.describe_arg(*arg)).collect();
            let [x, y, z] = grid;
            format!("{}({}) <{x},{y},{z};{block}> [{}]", kernel.entry, defines.join(" "), args.join(" "))
        });
    }

    fn describe_arg(&self, arg: Arg) -> String {
        match arg {
            Arg::Ptr(0) => "null".to_string(),
            Arg::Ptr(address) => match lock(&self.pool).offset(address) {
                Some(0) => "*".to_string(),
                Some(offset) => format!("*+{offset}"),
                None => "host".to_string(),
            },
            Arg::I32(value) => value.to_string(),
            Arg::U32(value) => value.to_string(),
            Arg::I64(value) => value.to_string(),
            Arg::U64(value) => value.to_string(),
            Arg::F32(value) => format!("{value:?}f"),
        }
    }
}

/// A product on one line.
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
