//! Helpers of tests: seeded inputs, and comparison of an op on the CPU and on a GPU.

pub mod allocator;
#[cfg(test)]
pub(crate) mod matrix;

use crate::cuda::{CudaDevice, GpuModel, arch_of, compile_all};
use crate::ops::{CastStatistics, CodeCopies, CurrentScaling, cast, kernels, normal, quantize_blocks, real_type};
use crate::{DType, Device, Granularity, QuantizedTensor, Result, Tensor};
use std::fs::File;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// The allowed difference between results.
#[derive(Clone, Copy, Debug)]
pub enum Tolerance {
    /// No difference: the bits must be the same.
    Exact,
    /// This many roundings of the type, relative to the larger one of the value and the RMS of the tensor.
    Steps(DType, f64),
}

impl Tolerance {
    fn relative(self) -> f64 {
        match self {
            Tolerance::Exact => 0.0,
            Tolerance::Steps(dtype, steps) => dtype.epsilon() * steps,
        }
    }
}

/// Returns the GPU. If this machine has none, returns `None` and prints a line to standard error. Panics if the GPU does not open, or if there is
/// none although `OTTAVA_REQUIRE_GPU` is set. The first call compiles every kernel into the disk cache, on all cores.
///
/// Call it in the thread of a test, not in threads that the test starts: other tests that call it wait until the thread ends.
pub fn gpu() -> Option<Device> {
    static GPU: OnceLock<Option<Device>> = OnceLock::new();
    let gpu = GPU.get_or_init(|| match CudaDevice::count() {
        Ok(n) if n > 0 => {
            let gpu = CudaDevice::open(0).expect("the GPU of this machine opens");
            gpu.skip_gemm_timing();
            // If several processes start, the first one compiles, and the other processes wait and read its cache. Without the lock each process
            // would compile.
            let lock = File::create(std::env::temp_dir().join("ottava-tests.lock"));
            let locked = lock.and_then(|file| file.lock().map(|()| file));
            // Errors are reported by the tests that launch the kernel.
            drop(compile_all(&kernels(), &arch_of(gpu.capability())));
            drop(locked);
            Some(Device::Cuda(gpu))
        }
        _ => {
            assert!(
                std::env::var_os("OTTAVA_REQUIRE_GPU").is_none(),
                "OTTAVA_REQUIRE_GPU is set, and this machine has no GPU"
            );
            eprintln!("skipped on the GPU: no GPU found");
            None
        }
    });
    if gpu.is_some() {
        use_gpu_alone();
    }
    gpu.clone()
}

/// Makes tests in other threads that use a GPU wait until this thread ends. All tests share the device, which has one stream of kernels. Work of one
/// test must not join a graph that another test captures, and must not run with another test's kernel settings.
pub(crate) fn use_gpu_alone() {
    static IN_USE: Mutex<()> = Mutex::new(());
    thread_local! {
        static HELD: MutexGuard<'static, ()> = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
    }
    HELD.with(|_| ());
}

/// Returns normal values, seeded by `name` and the shape.
pub fn normals(name: &str, shape: &[usize], dtype: DType) -> Tensor {
    let seed = name
        .bytes()
        .chain(shape.iter().map(|&n| n as u8))
        .fold(7u64, |h, b| h.wrapping_mul(1_099_511_628_211) ^ u64::from(b));
    let x = normal(&Device::Cpu, shape, 1.0, seed).expect("host memory is not refused");
    cast(&x, dtype).expect("a floating-point type")
}

/// Casts `x` to FP8 with current scaling of this granularity.
pub fn quantized(x: &Tensor, format: DType, granularity: Granularity, copies: CodeCopies) -> Result<QuantizedTensor> {
    let (how, mut seen) = (CurrentScaling::default(), CastStatistics::new(x.device(), 1)?);
    quantize_blocks(x, format, granularity, how, copies, &mut seen, 0)
}

/// Returns integers in `0..below`, seeded by `name`.
pub fn integers(name: &str, n: usize, below: usize) -> Tensor {
    let values: Vec<i32> = normals(name, &[n], DType::F32)
        .to_vec::<f32>()
        .expect("F32")
        .iter()
        .map(|x| (x.to_bits() as usize % below) as i32)
        .collect();
    Tensor::from_slice(&Device::Cpu, &[n], &values).expect("as many as the shape")
}

/// Returns a GPU without data. It checks each launch against the declared kernels, and panics if an argument does not fit.
pub fn dry_gpu() -> Device {
    Device::dry_gpu(GpuModel::h200())
}

/// Runs `op` with the same `inputs` on the CPU, on a [`dry_gpu`], and on the GPU if the machine has one. Compares the results of the CPU and the GPU.
pub fn parity(inputs: &[Tensor], tolerance: Tolerance, op: impl Fn(&[Tensor]) -> Result<Vec<Tensor>>) {
    op(&copies(inputs, &dry_gpu())).expect("the op runs on a GPU without data");
    parity_of_values(inputs, tolerance, op);
}

/// Runs [`parity`] without the [`dry_gpu`], for an `op` that reads values on the host.
pub fn parity_of_values(inputs: &[Tensor], tolerance: Tolerance, op: impl Fn(&[Tensor]) -> Result<Vec<Tensor>>) {
    let on_cpu = op(inputs).expect("the op runs on the CPU");
    let Some(gpu) = gpu() else { return };
    let on_gpu = op(&copies(inputs, &gpu)).expect("the op runs on the GPU");
    for (i, (cpu, gpu)) in on_cpu.iter().zip(&on_gpu).enumerate() {
        assert_close(&format!("result {i}, CPU against GPU"), cpu, gpu, tolerance);
    }
}

fn copies(inputs: &[Tensor], device: &Device) -> Vec<Tensor> {
    inputs.iter().map(|x| x.to_device(device).expect("a copy to the device")).collect()
}

/// Panics with index, values and bits of the worst element if `a` and `b` differ by more than `tolerance`.
pub fn assert_close(what: &str, a: &Tensor, b: &Tensor, tolerance: Tolerance) {
    assert_eq!((a.shape(), a.dtype()), (b.shape(), b.dtype()), "{what}: shapes and types");
    let (a_bytes, b_bytes) = (a.read_bytes().expect("readable"), b.read_bytes().expect("readable"));
    if a_bytes == b_bytes {
        return;
    }
    let size = a.dtype().size();
    let bits = |i: usize| (hex(&a_bytes[i * size..][..size]), hex(&b_bytes[i * size..][..size]));
    if matches!(tolerance, Tolerance::Exact) {
        let differing: Vec<usize> =
            (0..a.len()).filter(|i| a_bytes[i * size..][..size] != b_bytes[i * size..][..size]).collect();
        let first = differing[0];
        panic!(
            "{what}: {} of {} elements differ, the first at {first}: bits {:?}",
            differing.len(),
            a.len(),
            bits(first)
        );
    }
    let (x, y) = (values(a), values(b));
    let rms = (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64).sqrt();
    let error = |i: usize| match (x[i] - y[i]).abs() / x[i].abs().max(rms) {
        e if e.is_nan() && x[i].to_bits() == y[i].to_bits() => 0.0,
        e if e.is_nan() => f64::INFINITY,
        e => e,
    };
    let worst = (0..x.len()).max_by(|&i, &j| error(i).total_cmp(&error(j))).expect("not empty");
    assert!(
        error(worst) <= tolerance.relative(),
        "{what}: element {worst} is {:e} against {:e} (bits {:?}), {:e} apart, {:e} allowed",
        x[worst],
        y[worst],
        bits(worst),
        error(worst),
        tolerance.relative()
    );
}

/// Returns the elements of a floating-point tensor, widened.
pub fn values(x: &Tensor) -> Vec<f64> {
    let cpu = x.to_device(&Device::Cpu).expect("readable");
    match real_type(cpu.dtype()) {
        DType::F64 => cpu.to_vec::<f64>().expect("F64"),
        _ if cpu.dtype().is_fp8() => crate::element::with_float!(cpu.dtype(), S => {
            cpu.to_vec::<S>().expect("FP8").iter().map(|&v| crate::element::Real::to_f64(crate::element::Float::load(v))).collect()
        }),
        _ => cast(&cpu, DType::F64).expect("a floating-point type").to_vec::<f64>().expect("F64"),
    }
}

/// Returns `⟨a, b⟩`.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Returns `|a - b| / |b|`, or 0 if both are zero.
pub fn relative_error(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len(), "as many elements");
    let apart: f64 = a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum();
    if apart == 0.0 { 0.0 } else { (apart / dot(b, b)).sqrt() }
}

/// Returns the largest `|a - b|` over the largest `|b|`.
pub fn largest_error(a: &[f64], b: &[f64]) -> f64 {
    let apart = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    if apart == 0.0 { 0.0 } else { apart / b.iter().fold(0.0, |m: f64, b| m.max(b.abs())) }
}

/// Panics unless `gradient` is the gradient of `loss` at `x`, by central differences of F64 at up to 40 of its elements.
pub fn assert_gradient(what: &str, x: &Tensor, gradient: &Tensor, loss: impl Fn(&Tensor) -> f64) {
    const STEP: f64 = 1e-5;
    let (at, found) = (values(x), values(gradient));
    assert_eq!(at.len(), found.len(), "{what}: as many elements");
    let largest = found.iter().fold(1e-6f64, |m, d| m.max(d.abs()));
    let every = at.len().div_ceil(40).next_multiple_of(2) - 1;
    for i in (0..at.len()).step_by(every) {
        let moved = |by: f64| {
            let mut moved = at.clone();
            moved[i] += by;
            loss(&Tensor::from_slice(&Device::Cpu, x.shape(), &moved).expect("as many as the shape"))
        };
        let expected = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
        let error = (found[i] - expected).abs() / largest;
        assert!(error < 1e-7, "{what}: element {i} is {}, and the difference is {expected}", found[i]);
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().rev().map(|b| format!("{b:02x}")).collect()
}
