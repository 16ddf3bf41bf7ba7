//! NVRTC compiles CUDA C++ to cubins at run time, and the cubins are cached on disk. It needs no GPU and no CUDA toolkit.

use super::driver::supported;
use super::kernel::{KernelModule, Source};
use super::load::{LibraryReport, NVRTC, Problem, SearchPath, SharedLibrary, functions};
use super::shipped;
use crate::dtype::DType;
use crate::error::{Error, Result};
use sha2::{Digest, Sha256};
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// The environment variable with the folder for compiled kernels and GEMM choices.
pub const CACHE_VARIABLE: &str = "OTTAVA_CACHE_DIR";

type Program = *mut c_void;

functions! {
    struct Api {
        version = nvrtcVersion(*mut i32, *mut i32) -> i32;
        error_string = nvrtcGetErrorString(i32) -> *const c_char;
        create = nvrtcCreateProgram(
            *mut Program, *const c_char, *const c_char, i32, *const *const c_char, *const *const c_char,
        ) -> i32;
        destroy = nvrtcDestroyProgram(*mut Program) -> i32;
        compile = nvrtcCompileProgram(Program, i32, *const *const c_char) -> i32;
        log_size = nvrtcGetProgramLogSize(Program, *mut usize) -> i32;
        log = nvrtcGetProgramLog(Program, *mut c_char) -> i32;
        cubin_size = nvrtcGetCUBINSize(Program, *mut usize) -> i32;
        cubin = nvrtcGetCUBIN(Program, *mut c_char) -> i32;
    }
}

fn opened() -> &'static Result<Api, Problem> {
    static OPENED: OnceLock<Result<Api, Problem>> = OnceLock::new();
    OPENED.get_or_init(|| {
        let library = SharedLibrary::open(&supported(&NVRTC), SearchPath::of_process())?;
        // NVRTC opens this library by name. In a Python package, the linker finds the library only if it is already open.
        library.preload_sibling("libnvrtc-builtins.so.");
        Api::load(library)
    })
}

fn api() -> Result<&'static Api> {
    opened().as_ref().map_err(|problem| problem.clone().into())
}

/// Opens NVRTC. Returns an error if it is missing.
pub(super) fn require() -> Result<()> {
    api().map(|_| ())
}

pub(super) fn report() -> LibraryReport {
    LibraryReport::new(&NVRTC, opened(), |api| &api.library, |api| api.version_text().ok())
}

/// Returns the NVRTC name of a compute capability. Hopper-specific instructions need the suffix `a`.
pub fn arch_of(capability: (i32, i32)) -> String {
    match capability {
        (9, 0) => "sm_90a".to_string(),
        (major, minor) => format!("sm_{major}{minor}"),
    }
}

/// The macros with the largest finite values of narrow types.
const LARGEST: [(&str, DType); 3] = [("MAX_F16", DType::F16), ("MAX_E4M3", DType::E4M3), ("MAX_E5M2", DType::E5M2)];

/// Returns the cubin of `module` for `arch` (such as `sm_90a`). It is read from the pack of kernels in this program or from the disk cache. Otherwise
/// it is compiled. Multiplication and addition are not contracted to FMA, so that kernels match the CPU bit for bit.
///
/// Errors: [`Error::Library`] without NVRTC, [`Error::Compile`] with the compiler's log. A cache that cannot be read or written is not an error.
pub fn compile(module: &KernelModule, arch: &str) -> Result<Vec<u8>> {
    let (compilation, KernelModule { source, defines }) = (Compilation::new(module, arch), module);
    if let Some(cubin) = shipped::find(&compilation.key()) {
        return Ok(cubin);
    }
    let api = api()?;
    let file = format!("{}-{}.cubin", source.name, compilation.key_with(&api.version_text()?));
    cached(&cache_folder().join("kernels").join(file), || {
        let start = Instant::now();
        let cubin = api.compile(source, &compilation.options)?;
        tracing::debug!("{} {defines:?} compiled in {:.2?}", source.name, start.elapsed());
        Ok(cubin)
    })
}

/// The text and the options from which a cubin is compiled.
pub(super) struct Compilation {
    text: &'static str,
    options: Vec<String>,
}

impl Compilation {
    pub(super) fn new(module: &KernelModule, arch: &str) -> Compilation {
        let KernelModule { source, defines } = module;
        let mut options = vec![
            format!("--gpu-architecture={arch}"),
            "-std=c++17".to_string(),
            "--fmad=false".to_string(),
            "-default-device".to_string(),
        ];
        options.extend(source.constants.iter().map(|(name, value)| format!("-D{name}={value}")));
        let largest = |dtype: DType| dtype.max_finite().expect("a narrow type");
        options.extend(LARGEST.into_iter().map(|(name, dtype)| format!("-D{name}={:.1}f", largest(dtype))));
        options.extend(defines.iter().map(|(name, value)| format!("-D{name}={value}")));
        Compilation { text: source.text, options }
    }

    /// Returns a digest of the text and the options.
    pub(super) fn key(&self) -> String {
        self.key_with("")
    }

    /// Returns a digest of the text, the options and the version of the `compiler`.
    fn key_with(&self, compiler: &str) -> String {
        let mut key = Sha256::new();
        for part in self.options.iter().map(String::as_str).chain([compiler, self.text]) {
            key.update((part.len() as u64).to_le_bytes());
            key.update(part);
        }
        hex(&key.finalize())
    }
}

impl Api {
    fn version_text(&self) -> Result<String> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: NVRTC writes two ints.
        self.check(unsafe { (self.version)(&mut major, &mut minor) }, "nvrtcVersion")?;
        Ok(format!("{major}.{minor}"))
    }

    fn compile(&self, source: &Source, options: &[String]) -> Result<Vec<u8>> {
        let c_string = |text: &str| {
            CString::new(text).map_err(|_| Error::Value(format!("kernel {} or an option holds a zero", source.name)))
        };
        let (text, name) = (c_string(source.text)?, c_string(&format!("{}.cu", source.name))?);
        let options = options.iter().map(|option| c_string(option)).collect::<Result<Vec<_>>>()?;
        let option_pointers: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();

        let mut program = OpenProgram { api: self, program: null_mut() };
        // SAFETY: both strings end with a zero and outlive the call. No headers are passed.
        let status = unsafe { (self.create)(&mut program.program, text.as_ptr(), name.as_ptr(), 0, null(), null()) };
        self.check(status, "nvrtcCreateProgram")?;
        // SAFETY: the program lives, and `option_pointers` has a pointer to each option.
        let status = unsafe { (self.compile)(program.program, option_pointers.len() as i32, option_pointers.as_ptr()) };
        if status != 0 {
            let log = program.bytes(self.log_size, self.log, "nvrtcGetProgramLog")?;
            let log = String::from_utf8_lossy(&log).trim_end_matches(['\0', '\n']).to_string();
            let log = if log.is_empty() { self.describe(status) } else { log };
            return Err(Error::Compile { kernel: source.name.to_string(), log });
        }
        program.bytes(self.cubin_size, self.cubin, "nvrtcGetCUBIN")
    }

    fn describe(&self, status: i32) -> String {
        // SAFETY: NVRTC returns a constant string for each status.
        let text = unsafe { (self.error_string)(status) };
        if text.is_null() {
            return format!("status {status}");
        }
        // SAFETY: the pointer is not null, and the string is constant.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    fn check(&self, status: i32, call: &str) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        Err(Error::Cuda { library: NVRTC.name, call: call.to_string(), message: self.describe(status) })
    }
}

/// An NVRTC program that is destroyed when this value is dropped.
struct OpenProgram<'a> {
    api: &'a Api,
    program: Program,
}

impl OpenProgram<'_> {
    /// Returns a result of the program. `size` reads its size, and `read` its bytes.
    fn bytes(
        &self,
        size: unsafe extern "C" fn(Program, *mut usize) -> i32,
        read: unsafe extern "C" fn(Program, *mut c_char) -> i32,
        call: &str,
    ) -> Result<Vec<u8>> {
        let mut length = 0;
        // SAFETY: the program lives, and NVRTC writes one size.
        self.api.check(unsafe { size(self.program, &mut length) }, call)?;
        let mut bytes = vec![0u8; length];
        // SAFETY: NVRTC writes exactly the size that it returned.
        self.api.check(unsafe { read(self.program, bytes.as_mut_ptr().cast()) }, call)?;
        Ok(bytes)
    }
}

impl Drop for OpenProgram<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: nvrtcCreateProgram created the program, and nothing uses it afterwards.
            unsafe { (self.api.destroy)(&mut self.program) };
        }
    }
}

/// Returns the cache folder: `OTTAVA_CACHE_DIR` if it is set, otherwise `ottava` in the user's cache folder.
pub(super) fn cache_folder() -> PathBuf {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable(CACHE_VARIABLE)
        .or_else(|| variable("XDG_CACHE_HOME").map(|folder| folder.join("ottava")))
        .or_else(|| variable("HOME").map(|folder| folder.join(".cache/ottava")))
        .unwrap_or_else(|| std::env::temp_dir().join("ottava"))
}

/// Returns the content of `file`. If the file is missing or damaged, calls `build` and writes its result to the file. Concurrent processes may call
/// it.
fn cached(file: &Path, build: impl FnOnce() -> Result<Vec<u8>>) -> Result<Vec<u8>> {
    if let Ok(stored) = std::fs::read(file)
        && let Some(content) = unseal(&stored)
    {
        return Ok(content.to_vec());
    }
    let content = build()?;
    if let Err(error) = replace(file, &seal(&content)) {
        tracing::warn!("{} was not written: {error}", file.display());
    }
    Ok(content)
}

/// Returns the content after its digest. The digest detects damaged files.
fn seal(content: &[u8]) -> Vec<u8> {
    [Sha256::digest(content).as_slice(), content].concat()
}

fn unseal(stored: &[u8]) -> Option<&[u8]> {
    let (digest, content) = stored.split_at_checked(32)?;
    (Sha256::digest(content).as_slice() == digest).then_some(content)
}

/// Replaces `file` atomically. Readers see the old or the new content.
pub(super) fn replace(file: &Path, content: &[u8]) -> std::io::Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let unique = format!("{}-{}.partial", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let partial = file.with_extension(unique);
    let written = std::fs::write(&partial, content).and_then(|()| std::fs::rename(&partial, file));
    if written.is_err() {
        let _ = std::fs::remove_file(&partial);
    }
    written
}

/// Returns bytes as lower-case hexadecimal digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn concurrent_builds_return_the_content_and_leave_one_file() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("kernels/a.cubin");
        std::thread::scope(|scope| {
            for _ in 0..16 {
                scope.spawn(|| {
                    let content = cached(&file, || Ok(vec![7; 100_000])).expect("content");
                    assert_eq!(content, vec![7; 100_000]);
                });
            }
        });
        let names: Vec<_> = std::fs::read_dir(folder.path().join("kernels")).expect("a folder").collect();
        assert_eq!(names.len(), 1, "{names:?}");
    }

    #[test]
    fn damaged_files_are_rebuilt_and_intact_ones_are_not() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("a.cubin");
        let builds = AtomicUsize::new(0);
        let get = || {
            cached(&file, || {
                builds.fetch_add(1, Ordering::Relaxed);
                Ok(b"cubin".to_vec())
            })
        };
        for damage in [&b""[..], b"short", &[0; 40]] {
            std::fs::write(&file, damage).expect("a file");
            assert_eq!(get().expect("content"), b"cubin");
            assert_eq!(get().expect("content"), b"cubin");
        }
        assert_eq!(builds.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn an_unwritable_cache_is_not_an_error() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        std::fs::write(folder.path().join("file"), b"").expect("a file");
        let below_a_file = folder.path().join("file/kernels/a.cubin");
        assert_eq!(cached(&below_a_file, || Ok(vec![1])).expect("content"), vec![1]);
    }

    #[test]
    fn a_kernel_compiles_for_hopper_without_a_gpu() {
        if let Err(problem) = require() {
            eprintln!("skipped: {problem}");
            return;
        }
        static GOOD: Source = Source::bare(
            "scale",
            r#"extern "C" __global__ void scale(X* x, int n) { int i = threadIdx.x; if (i < n) x[i] *= 2; }"#,
        );
        let good = KernelModule { source: &GOOD, defines: &[("X", "float")] };
        let cubin = compile(&good, "sm_90a").expect("a kernel");
        assert_eq!(&cubin[..4], b"\x7fELF");

        static BAD: Source = Source::bare("bad", "extern \"C\" __global__ void bad() { nothing; }");
        let error = compile(&KernelModule { source: &BAD, defines: &[] }, "sm_90a").expect_err("no such variable");
        assert!(
            matches!(&error, Error::Compile { kernel, log } if kernel == "bad" && log.contains("nothing")),
            "{error}"
        );
    }
}
