//! Tests of the CUDA layer on a GPU. Without a GPU, they are skipped with a message.

mod attention;

use super::*;
use crate::dtype::DType;
use crate::error::{Error, Result};
use DType::{BF16, E4M3, E5M2, F16, F32};
use std::sync::Arc;

/// A generator of reproducible random numbers (SplitMix64).
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number between -1 and 1.
    fn signed(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// Returns a value of about unit size as the bytes of `dtype`.
    fn element(&mut self, dtype: DType) -> Vec<u8> {
        match dtype {
            F32 => self.signed().to_le_bytes().to_vec(),
            F16 => half::f16::from_f32(self.signed()).to_le_bytes().to_vec(),
            BF16 => half::bf16::from_f32(self.signed()).to_le_bytes().to_vec(),
            // The sign and the mantissa are random, and the exponent is between 1/16 and 1.
            E4M3 => vec![(self.bits() & 0x87) as u8 | ((3 + self.bits() % 5) as u8) << 3],
            E5M2 => vec![(self.bits() & 0x83) as u8 | ((11 + self.bits() % 5) as u8) << 2],
            other => panic!("no random {other}"),
        }
    }

    fn elements(&mut self, dtype: DType, count: usize) -> Vec<u8> {
        (0..count).flat_map(|_| self.element(dtype)).collect()
    }
}

/// Returns the values of little-endian elements.
fn values(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    // The FP8 values are normal, because `Random::element` generates no subnormal values.
    let small = |code: u8, mantissa: i32, bias: i32| {
        let (exponent, fraction) = (i32::from(code & 0x7f) >> mantissa, i32::from(code) & ((1 << mantissa) - 1));
        let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
        sign * (1.0 + f64::from(fraction) / f64::from(1 << mantissa)) * f64::from(exponent - bias).exp2()
    };
    let pair = |pair: &[u8]| [pair[0], pair[1]];
    bytes
        .chunks_exact(dtype.size())
        .map(|x| match dtype {
            F32 => f64::from(f32::from_le_bytes([x[0], x[1], x[2], x[3]])),
            F16 => half::f16::from_le_bytes(pair(x)).to_f64(),
            BF16 => half::bf16::from_le_bytes(pair(x)).to_f64(),
            E4M3 => small(x[0], 3, 7),
            E5M2 => small(x[0], 2, 15),
            other => panic!("no values of {other}"),
        })
        .collect()
}

/// Opens the GPU with its own stream and pool.
fn own_device() -> Option<Arc<CudaDevice>> {
    test_device().map(|_| CudaDevice::open(0).expect("the GPU again"))
}

fn upload(device: &Arc<CudaDevice>, bytes: &[u8]) -> DeviceBuffer {
    let mut buffer = device.alloc(bytes.len()).expect("memory");
    buffer.write(0, bytes).expect("a copy");
    buffer
}

fn download(buffer: &DeviceBuffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.len()];
    buffer.read(0, &mut bytes).expect("a copy");
    bytes
}

#[test]
fn copies_round_trip() {
    let Some(device) = test_device() else { return };
    let (major, minor) = device.capability();
    let driver = device.driver_version();
    eprintln!("{device:?}: sm_{major}{minor}, {} SMs, driver {driver:?}", device.sm_count());
    assert!(CudaDevice::count().expect("a driver") > 0);

    let bytes = Random(1).elements(F32, 300_000);
    let mut first = upload(&device, &bytes);
    assert_eq!(first.ptr() % 256, 0);
    assert!(download(&first) == bytes);

    let mut second = device.alloc(bytes.len()).expect("memory");
    second.fill_zero(0, bytes.len()).expect("a fill");
    second.copy_from(1001, &first, 7, 5000).expect("a copy");
    let copied = download(&second);
    assert!(
        copied[1001..6001] == bytes[7..5007] && copied[..1001].iter().chain(&copied[6001..]).all(|&byte| byte == 0)
    );

    for outside in [(bytes.len(), 1), (bytes.len() - 1, 2), (usize::MAX, 2)] {
        assert!(matches!(first.fill_zero(outside.0, outside.1), Err(Error::Value(_))));
    }
    assert!(device.alloc(0).expect("memory").read(0, &mut []).is_ok());
}

/// A kernel with an argument of each kind. `FACTOR` is a define.
static ARGUMENTS: Source = Source::bare(
    "arguments",
    r#"
extern "C" __global__ void mix(double* out, int a, unsigned b, long long c, unsigned long long d, float e) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < 100) out[i] = FACTOR * ((double)a + b + c + d + e) + i;
}
extern "C" __global__ void reverse(float* out, const float* in, int n) {
    extern __shared__ float shared[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) shared[n - 1 - i] = in[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = shared[i];
}
extern "C" __global__ void fault(int* nowhere) { *nowhere = 1; }
"#,
);
const MIX: Kernel = Kernel { source: &ARGUMENTS, defines: &[("FACTOR", "3")], entry: "mix", args: Vec::new() };
const REVERSE: Kernel = Kernel { source: &ARGUMENTS, defines: &[("FACTOR", "3")], entry: "reverse", args: Vec::new() };
const FAULT: Kernel = Kernel { source: &ARGUMENTS, defines: &[("FACTOR", "3")], entry: "fault", args: Vec::new() };

#[test]
fn kernel_arguments_of_every_type_arrive() {
    let Some(device) = test_device() else { return };
    let out = device.alloc(800).expect("memory");
    let args = vec![
        Arg::Ptr(out.ptr()),
        Arg::I32(-5),
        Arg::U32(1 << 31),
        Arg::I64(-1 << 40),
        Arg::U64(1 << 41),
        Arg::F32(0.5),
    ];
    // SAFETY: the arguments are the arguments of the kernel, and `out` holds 100 doubles.
    unsafe { device.launch(&Kernel { args, ..MIX }, [4, 1, 1], 32, 0).expect("a launch") };
    let expected = 3.0 * (-5.0 + 2f64.powi(31) - 2f64.powi(40) + 2f64.powi(41) + 0.5);
    for (i, value) in download(&out).chunks_exact(8).enumerate() {
        assert_eq!(f64::from_le_bytes(value.try_into().expect("eight bytes")), expected + i as f64);
    }

    // The kernel needs more shared memory than the default limit.
    let n = 20_000;
    let bytes = Random(2).elements(F32, n);
    let input = upload(&device, &bytes);
    let out = device.alloc(bytes.len()).expect("memory");
    let reverse = Kernel { args: vec![Arg::Ptr(out.ptr()), Arg::Ptr(input.ptr()), Arg::I32(n as i32)], ..REVERSE };
    // SAFETY: both buffers hold `n` floats, and the shared memory holds `n` floats.
    unsafe { device.launch(&reverse, [1, 1, 1], 256, 4 * n as u32).expect("a launch") };
    let reversed: Vec<u8> = bytes.chunks_exact(4).rev().flatten().copied().collect();
    assert!(download(&out) == reversed);

    // SAFETY: an empty grid runs nothing.
    unsafe { device.launch(&REVERSE, [0, 1, 1], 256, 0).expect("nothing to do") };
    let missing = Kernel { entry: "no_such_kernel", ..REVERSE };
    // SAFETY: the kernel does not exist, and nothing runs.
    let error = unsafe { device.launch(&missing, [1, 1, 1], 1, 0) }.expect_err("no such kernel");
    assert!(error.to_string().contains("no_such_kernel"), "{error}");
    // SAFETY: the block has too many threads, and nothing runs.
    let error = unsafe { device.launch(&reverse, [1, 1, 1], 4096, 0) }.expect_err("a bad launch");
    assert!(error.to_string().contains("reverse"), "{error}");
    device.synchronize().expect("errors before a launch leave the device well");
}

#[test]
fn launches_from_many_threads_are_correct() {
    let Some(device) = test_device() else { return };
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let device = &device;
            scope.spawn(move || {
                for round in 0..50 {
                    let bytes = Random(thread * 100 + round).elements(F32, 1000);
                    let input = upload(device, &bytes);
                    let out = device.alloc(4000).expect("memory");
                    let args = vec![Arg::Ptr(out.ptr()), Arg::Ptr(input.ptr()), Arg::I32(1000)];
                    // SAFETY: both buffers hold 1000 floats, and the shared memory holds 1000 floats.
                    unsafe { device.launch(&Kernel { args, ..REVERSE }, [1, 1, 1], 128, 4000).expect("a launch") };
                    let reversed: Vec<u8> = bytes.chunks_exact(4).rev().flatten().copied().collect();
                    assert!(download(&out) == reversed);
                }
            });
        }
    });
}

/// Causes a fault. It runs in a separate process, because a fault makes the device unusable in its process.
#[test]
#[ignore = "started by a_fault_names_its_kernel"]
fn faulting_process() {
    let Some(device) = test_device() else { return };
    // SAFETY: the address is invalid on purpose.
    unsafe { device.launch(&Kernel { args: vec![Arg::Ptr(64)], ..FAULT }, [1, 1, 1], 1, 0).expect("a launch") };
    let first = device.synchronize().expect_err("a fault").to_string();
    let second = device.alloc(100 << 20).err().expect("the device is lost").to_string();
    println!("first: {first}\nsecond: {second}");
    // Dropping the device must not panic.
}

#[test]
fn a_fault_names_its_kernel() {
    if test_device().is_none() {
        return;
    }
    let program = std::env::current_exe().expect("this test");
    let child = std::process::Command::new(program)
        .args(["--exact", "cuda::tests::faulting_process", "--ignored", "--nocapture"])
        .output()
        .expect("a child process");
    let text = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success(), "{text}\n{}", String::from_utf8_lossy(&child.stderr));
    for line in ["first: ", "second: "] {
        let message = text.lines().find(|text| text.contains(line)).expect("two messages");
        assert!(message.contains("illegal") && message.contains("in fault"), "{message}");
    }
}

#[test]
fn freed_buffers_are_reused() {
    let Some(device) = own_device() else { return };
    let bytes = 3 << 30;
    let large = device.alloc(bytes).expect("memory");
    let before = device.memory();
    let expected = MemoryStats { allocated: bytes, peak: bytes, reserved: bytes, driver_allocations: 1 };
    assert_eq!(before, expected);
    let address = large.ptr();
    drop(large);
    for _ in 0..10 {
        assert_eq!(device.alloc(bytes).expect("the same memory").ptr(), address);
    }
    assert_eq!(device.memory(), MemoryStats { allocated: 0, ..expected });
    assert!(matches!(device.alloc(1 << 50), Err(Error::OutOfMemory { requested, .. }) if requested == 1 << 50));
    assert_eq!(device.memory().reserved, 0, "out of memory released idle segments");
    drop(device.alloc(100).expect("memory"));
    device.release_memory().expect("idle segments go back");
    assert_eq!(device.memory().reserved, 0);
    assert_eq!(Arc::strong_count(&device), 1, "buffers release their device");
}

/// One product of a GEMM test.
struct Product {
    spec: GemmSpec,
    /// The number of bytes added to the address of `a` to misalign it.
    offset: usize,
}

/// Returns the pointers of a product that accumulates into `out`.
fn pointers(a: u64, b: u64, a_scale: u64, b_scale: u64, out: u64) -> GemmPointers {
    GemmPointers { a, b, a_scale, b_scale, addend: out, out }
}

impl Product {
    /// Runs the product and compares it with a sum in F64. Returns the largest error in units of the tolerance.
    fn error(&self, device: &Arc<CudaDevice>, random: &mut Random) -> Result<f64> {
        let GemmSpec { m, n, k, .. } = self.spec;
        let spec = &self.spec;
        let rows = |layout, outer| if layout == Major::K { outer } else { k };
        let a_bytes = random.elements(spec.a, rows(spec.a_layout, m) * spec.lda);
        let b_bytes = random.elements(spec.b, rows(spec.b_layout, n) * spec.ldb);
        let out_bytes = random.elements(spec.out, m * spec.ldc);
        let (a_scale, b_scale) = (0.75f32, 0.5f32);
        let a = upload(device, &[&vec![0; self.offset][..], &a_bytes].concat());
        let (b, out) = (upload(device, &b_bytes), upload(device, &out_bytes));
        let scale = |value: f32| upload(device, &value.to_le_bytes());
        let scales = [scale(a_scale), scale(b_scale)];
        let scaled = spec.scale == ScaleMode::PerTensor;
        let scale_at = |index: usize| if scaled { scales[index].ptr() } else { 0 };
        let a_at = a.ptr() + self.offset as u64;
        // SAFETY: the buffers were made for this spec.
        unsafe { device.gemm(spec, &pointers(a_at, b.ptr(), scale_at(0), scale_at(1), out.ptr()))? };

        let (a, b) = (values(spec.a, &a_bytes), values(spec.b, &b_bytes));
        let (before, after) = (values(spec.out, &out_bytes), values(spec.out, &download(&out)));
        let at = |layout, row: usize, column: usize, stride: usize| match layout {
            Major::K => row * stride + column,
            Major::MN => column * stride + row,
        };
        let factor = if scaled { f64::from(a_scale * b_scale) } else { 1.0 };
        // Sums are F32. The tensor cores keep 14 bits of FP8 products. In fast mode, they keep 14 bits of the whole sum.
        let sum_tolerance = match (spec.a.is_fp8(), spec.fast_accumulation) {
            (true, true) => 2e-3,
            (true, false) => 5e-4,
            (false, _) => 1e-6,
        };
        let mut worst = 0f64;
        for i in 0..m {
            for j in 0..spec.ldc {
                let index = i * spec.ldc + j;
                if j >= n {
                    assert_eq!(before[index].to_bits(), after[index].to_bits(), "memory outside `out` is unchanged");
                    continue;
                }
                let products = (0..k)
                    .map(|l| a[at(spec.a_layout, i, l, spec.lda)] * b[at(spec.b_layout, j, l, spec.ldb)] * factor);
                let (sum, size) = products.fold((0.0, 0.0), |(sum, size), p: f64| (sum + p, size + p.abs()));
                let old = if spec.accumulate { before[index] } else { 0.0 };
                let expected = sum + old;
                // Some kernels of the library round the product to the type of `out` before they add to it.
                let rounded = expected.abs() + if spec.accumulate { sum.abs() } else { 0.0 };
                let tolerance = sum_tolerance * (size + old.abs()) + rounded * spec.out.epsilon();
                worst = worst.max(((after[index] - expected) / tolerance).abs());
                assert!(after[index].is_finite(), "{spec:?} at {i}, {j}");
            }
        }
        Ok(worst)
    }
}

const FP8_TYPES: [(DType, DType); 3] = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)];

/// Returns products of types wider than FP8, with various types, layouts, sizes and strides.
fn wide_products() -> Vec<Product> {
    let mut products = Vec::new();
    for (operand, out) in [(F32, F32), (BF16, BF16), (BF16, F32), (F16, F16), (F16, F32)] {
        for (a_layout, b_layout) in
            [(Major::K, Major::K), (Major::K, Major::MN), (Major::MN, Major::K), (Major::MN, Major::MN)]
        {
            for (size, padding) in [([64, 96, 128], 0), ([37, 53, 29], 0), ([1, 40, 72], 8), ([130, 1, 257], 3)] {
                for accumulate in [false, true] {
                    let [m, n, k] = size;
                    let row = |layout, outer| padding + if layout == Major::K { k } else { outer };
                    let (lda, ldb, ldc) = (row(a_layout, m), row(b_layout, n), n + padding);
                    let plain = GemmSpec::contiguous(size, operand, operand, out);
                    let spec = GemmSpec { a_layout, b_layout, lda, ldb, ldc, accumulate, ..plain };
                    products.push(Product { spec, offset: 0 });
                }
            }
        }
        products
            .push(Product { spec: GemmSpec::contiguous([64, 64, 64], operand, operand, out), offset: operand.size() });
    }
    products
}

fn fp8_products() -> Vec<Product> {
    let mut products = Vec::new();
    for (a, b) in FP8_TYPES {
        for out in [BF16, F32] {
            for (size, padding) in [([64, 96, 128], 0), ([16, 16, 16], 0), ([144, 208, 1040], 16)] {
                for (accumulate, fast_accumulation) in [(false, false), (false, true), (true, false), (true, true)] {
                    for scale in [ScaleMode::None, ScaleMode::PerTensor] {
                        let plain = GemmSpec::contiguous(size, a, b, out);
                        let (lda, ldb, ldc) = (size[2] + padding, size[2] + padding, size[1] + padding);
                        let spec = GemmSpec { lda, ldb, ldc, scale, accumulate, fast_accumulation, ..plain };
                        products.push(Product { spec, offset: 0 });
                    }
                }
            }
        }
    }
    products
}

#[test]
fn products_match_f64_sums() {
    let Some(device) = test_device() else { return };
    let mut random = Random(3);
    for (kind, products) in [("wide", wide_products()), ("FP8", fp8_products())] {
        let (count, mut worst, mut failures) = (products.len(), 0f64, Vec::new());
        for product in products {
            match product.error(&device, &mut random) {
                Ok(error) => {
                    worst = worst.max(error);
                    if error >= 1.0 {
                        failures.push(format!("{error:.1} tolerances off: {:?}", product.spec));
                    }
                }
                Err(error) => failures.push(format!("{error}: {:?}", product.spec)),
            }
        }
        assert!(failures.is_empty(), "{} of {count} {kind} products:\n{}", failures.len(), failures.join("\n"));
        eprintln!("{count} {kind} products, at most {worst:.3} of the tolerance");
    }
}

/// For sizes that the hardware may not support, the result is correct or an error.
#[test]
fn unusual_fp8_sizes_are_correct_or_errors() {
    let Some(device) = test_device() else { return };
    let mut random = Random(4);
    for (m, n, k) in [(33, 64, 64), (64, 33, 64), (1, 64, 64), (64, 1, 64), (8, 8, 64), (64, 40, 64), (40, 64, 64)] {
        for out in [BF16, F32] {
            let spec = GemmSpec::contiguous([m, n, k], E4M3, E4M3, out);
            match (Product { spec, offset: 0 }).error(&device, &mut random) {
                Ok(error) => {
                    assert!(error < 1.0, "{error}: {spec:?}");
                    eprintln!("FP8 {m}x{n}x{k} to {out}: {error:.3} of the tolerance");
                }
                Err(error) => eprintln!("FP8 {m}x{n}x{k} to {out}: {error}"),
            }
        }
    }
    let aligned = GemmSpec::contiguous([64, 64, 64], E4M3, E4M3, F32);
    let outcome = Product { spec: aligned, offset: 1 }.error(&device, &mut random);
    eprintln!("FP8 from an odd address: {outcome:?}");
    assert!(!outcome.is_ok_and(|error| error >= 1.0));
    let bytes = upload(&device, &random.elements(E4M3, 4 * 64 * 64));
    let scaled = GemmSpec { scale: ScaleMode::PerTensor, ..aligned };
    for scales in [[0, 0], [bytes.ptr(), bytes.ptr() + 4]] {
        // SAFETY: the buffer is large enough for each operand, and the scales are refused.
        let outcome =
            unsafe { device.gemm(&scaled, &pointers(bytes.ptr(), bytes.ptr(), scales[0], scales[1], bytes.ptr())) };
        assert!(matches!(outcome, Err(Error::Value(_))), "{outcome:?}");
    }
    let both = GemmSpec::contiguous([64, 64, 64], E5M2, E5M2, F32);
    assert!(matches!(Product { spec: both, offset: 0 }.error(&device, &mut random), Err(Error::Value(_))));
}

#[test]
fn graph_replay_is_bit_identical() {
    // A capture includes the work of each thread, and other tests must use another stream.
    let Some(device) = own_device() else { return };
    let spec = GemmSpec::contiguous([128, 192, 256], E4M3, E4M3, F32);
    let mut random = Random(5);
    let (a, b) =
        (upload(&device, &random.elements(E4M3, 128 * 256)), upload(&device, &random.elements(E4M3, 192 * 256)));
    let (product, out) = (device.alloc(128 * 192 * 4).expect("memory"), device.alloc(4000).expect("memory"));
    let shape = AttentionShape::fused([1, 64], 2, 1, 32);
    let qkv = upload(&device, &random.elements(BF16, 64 * shape.q_stride));
    let (o, lse) = (device.alloc(64 * 64 * 2).expect("memory"), device.alloc(shape.lse_len() * 4).expect("memory"));
    let forward = AttentionForward {
        q: qkv.ptr(),
        k: qkv.ptr() + 128,
        v: qkv.ptr() + 192,
        o: o.ptr(),
        lse: lse.ptr(),
        documents: Default::default(),
    };
    let work = || {
        // SAFETY: the buffers were made for the spec and the shape, and `reverse` gets 1000 floats.
        unsafe {
            device.gemm(&spec, &pointers(a.ptr(), b.ptr(), 0, 0, product.ptr()))?;
            let args = vec![Arg::Ptr(out.ptr()), Arg::Ptr(product.ptr()), Arg::I32(1000)];
            device.launch(&Kernel { args, ..REVERSE }, [1, 1, 1], 128, 4000)?;
            device.attention_forward(&shape, ScoreFactors { scale: 0.2, soft_cap: 0.0 }, &forward)
        }
    };
    let results = || [download(&product), download(&out), download(&o), download(&lse)];
    if let Err(error @ Error::Library { .. }) = work() {
        eprintln!("skipped: {error}");
        return;
    }
    let eager = results();
    let mut graph = Graph::capture(&device, work).expect("a capture");
    for _ in 0..3 {
        for buffer in [&product, &out, &o, &lse] {
            // SAFETY: the buffer is live and has this length.
            unsafe { device.context().expect("a GPU").fill(buffer.ptr(), 0xff, buffer.len()).expect("a fill") };
        }
        graph.replay().expect("a replay");
        assert!(results() == eager);
    }
    drop(out);
    assert!(!graph.is_valid() && graph.replay().is_err(), "a buffer was freed");
    drop(graph);
    let refused = Graph::capture(&device, || Err(Error::Value("no work".to_string())));
    assert!(matches!(refused, Err(Error::Value(text)) if text == "no work"));
    device.synchronize().expect("the capture has ended");
}

/// Prints rates to compare with the library's best rates. It asserts nothing, because machines differ.
#[test]
#[ignore = "takes seconds and prints rates"]
fn rates() {
    let Some(device) = test_device() else { return };
    let seconds = |work: &dyn Fn()| {
        (0..3).for_each(|_| work());
        let start = device.record().expect("an event");
        (0..20).for_each(|_| work());
        f64::from(start.milliseconds_until(&device.record().expect("an event")).expect("a time")) / 20e3
    };
    let n = 8192;
    for (a, b, out, fast) in
        [(BF16, BF16, BF16, false), (E4M3, E4M3, BF16, true), (E4M3, E4M3, BF16, false), (E4M3, E5M2, F32, false)]
    {
        let scale = if a.is_fp8() { ScaleMode::PerTensor } else { ScaleMode::None };
        let plain = GemmSpec::contiguous([n, n, n], a, b, out);
        let spec = GemmSpec { scale, fast_accumulation: fast, accumulate: out == F32, ..plain };
        let mut random = Random(6);
        let row = |dtype, random: &mut Random| random.elements(dtype, n * 64).repeat(n / 64);
        let (a_data, b_data) = (upload(&device, &row(a, &mut random)), upload(&device, &row(b, &mut random)));
        let one = upload(&device, &1f32.to_le_bytes());
        let one_at = if a.is_fp8() { one.ptr() } else { 0 };
        let result = device.alloc(n * n * out.size()).expect("memory");
        // SAFETY: the buffers were made for the spec.
        let time = seconds(&|| unsafe {
            let at = pointers(a_data.ptr(), b_data.ptr(), one_at, one_at, result.ptr());
            device.gemm(&spec, &at).expect("a product");
        });
        eprintln!("{a} {b} {out} fast {fast}: {:.0} TFLOP/s", 2.0 * (n as f64).powi(3) / time / 1e12);
    }
    let shape = AttentionShape::fused([2, 4096], 32, 32, 128);
    let qkv = upload(&device, &Random(7).elements(BF16, 4096 * shape.q_stride / 64).repeat(128));
    let dqkv = device.alloc(qkv.len()).expect("memory");
    let o = device.alloc(qkv.len() / 3).expect("memory");
    let lse = device.alloc(shape.lse_len() * 4).expect("memory");
    let parts = |buffer: &DeviceBuffer| [0, 1, 2].map(|part| buffer.ptr() + part * 2 * 4096);
    let ([q, k, v], [dq, dk, dv]) = (parts(&qkv), parts(&dqkv));
    let forward = AttentionForward { q, k, v, o: o.ptr(), lse: lse.ptr(), documents: Default::default() };
    let backward = AttentionBackward { forward, d_o: o.ptr(), dq, dk, dv };
    let factors = ScoreFactors { scale: 0.088, soft_cap: 0.0 };
    // SAFETY: the buffers were made for the shape.
    let time = seconds(&|| unsafe { device.attention_forward(&shape, factors, &forward).expect("attention") });
    let work = 4.0 * 4096f64.powi(2) / 2.0 * 2.0 * 32.0 * 128.0;
    eprintln!("attention forward: {:.0} TFLOP/s, {:.3} ms", work / time / 1e12, time * 1e3);
    // SAFETY: the buffers were made for the shape.
    let time = seconds(&|| unsafe { device.attention_backward(&shape, factors, &backward).expect("attention") });
    eprintln!("attention backward: {:.0} TFLOP/s, {:.3} ms", 2.5 * work / time / 1e12, time * 1e3);
    let first = download(&dqkv);
    // SAFETY: the buffers were made for the shape.
    unsafe { device.attention_backward(&shape, factors, &backward).expect("attention") };
    let differing = first.iter().zip(download(&dqkv)).filter(|(a, b)| **a != *b).count();
    eprintln!("attention backward again: {differing} of {} bytes differ", first.len());
    eprintln!("{:?}", device.memory());
}
