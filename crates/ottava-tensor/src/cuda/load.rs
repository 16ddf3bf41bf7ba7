//! Finds and opens the CUDA libraries of the machine.
//!
//! Only versioned names are tried, so that unversioned development links cannot mix versions. The search order is: the folders of
//! `OTTAVA_LIBRARY_PATH`, the search of the dynamic linker, the `nvidia/*/lib` folders of Python environments (first the environment of this
//! program), and the folders of CUDA toolkits. A library is opened once and stays open until the process ends.

use crate::error::{Error, Result};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CStr, OsStr, c_void};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The environment variable with the folders to search first, separated by colons.
pub const LIBRARY_PATH_VARIABLE: &str = "OTTAVA_LIBRARY_PATH";

/// The reason why a library cannot be used. It is cached, because each library is searched for once.
#[derive(Clone, Debug)]
pub(super) struct Problem {
    pub(super) library: &'static str,
    pub(super) reason: String,
    pub(super) remedy: &'static str,
}

impl From<Problem> for Error {
    fn from(problem: Problem) -> Error {
        Error::Library { library: problem.library, reason: problem.reason, remedy: problem.remedy.to_string() }
    }
}

/// A library to search for: its file names, newest first, and the remedy if it is missing.
pub(super) struct Wanted {
    pub(super) name: &'static str,
    pub(super) sonames: &'static [&'static str],
    /// The name of a function that each version has. The address of this function identifies the opened file.
    pub(super) landmark: &'static str,
    pub(super) remedy: &'static str,
}

pub(super) const DRIVER: Wanted = Wanted {
    name: "CUDA driver",
    sonames: &["libcuda.so.1"],
    landmark: "cuInit",
    remedy: "Install NVIDIA's driver, or run where `nvidia-smi` works",
};
pub(super) const NVRTC: Wanted = Wanted {
    name: "NVRTC",
    sonames: &["libnvrtc.so.13", "libnvrtc.so.12"],
    landmark: "nvrtcVersion",
    remedy: "Try `pip install nvidia-cuda-nvrtc` (CUDA 13) or `nvidia-cuda-nvrtc-cu12`",
};
pub(super) const CUBLASLT: Wanted = Wanted {
    name: "cuBLASLt",
    sonames: &["libcublasLt.so.13", "libcublasLt.so.12"],
    landmark: "cublasLtGetVersion",
    remedy: "Try `pip install nvidia-cublas` (CUDA 13) or `nvidia-cublas-cu12`",
};
pub(super) const CUDNN: Wanted = Wanted {
    name: "cuDNN",
    sonames: &["libcudnn.so.9"],
    landmark: "cudnnGetVersion",
    remedy: "Try `pip install nvidia-cudnn-cu13` (CUDA 13) or `nvidia-cudnn-cu12`",
};
pub(super) const NCCL: Wanted = Wanted {
    name: "NCCL",
    sonames: &["libnccl.so.2"],
    landmark: "ncclGetVersion",
    remedy: "Needed for several GPUs only. Try `pip install nvidia-nccl-cu13` (CUDA 13) or `nvidia-nccl-cu12`",
};

/// An open library and its file.
pub(super) struct SharedLibrary {
    pub(super) name: &'static str,
    pub(super) remedy: &'static str,
    pub(super) path: Option<PathBuf>,
    handle: Library,
}

impl SharedLibrary {
    /// Opens the first file that is a library and has the landmark.
    pub(super) fn open(wanted: &Wanted, search: &SearchPath) -> Result<SharedLibrary, Problem> {
        let mut refused = Vec::new();
        for candidate in search.candidates(wanted.sonames) {
            let opened = open_file(&candidate).and_then(|handle| {
                let address = address_of(&handle, wanted.landmark)
                    .ok_or_else(|| format!("{} has no {}", candidate.display(), wanted.landmark))?;
                Ok((handle, file_of(address)))
            });
            match opened {
                Ok((handle, path)) => {
                    return Ok(SharedLibrary { name: wanted.name, remedy: wanted.remedy, path, handle });
                }
                // The linker's error for an unknown name adds nothing to the message.
                Err(message) if message.contains("No such file") && !candidate.is_absolute() => {}
                Err(message) => refused.push(message),
            }
        }
        let mut reason = format!("{} was searched for in {}", wanted.sonames.join(" or "), search.describe());
        for message in refused {
            reason = format!("{reason}; {message}");
        }
        Err(Problem { library: wanted.name, reason, remedy: wanted.remedy })
    }

    /// Returns the function called `name`. If the library lacks it, adds the name to `missing`.
    ///
    /// # Safety
    /// `F` must be the `extern "C"` function pointer type of that symbol.
    pub(super) unsafe fn function<F: Copy>(&self, name: &'static str, missing: &mut Vec<&'static str>) -> Option<F> {
        // SAFETY: the caller names the type. The pointer stays valid, because the library is never closed while it is used.
        let found = unsafe { self.handle.get::<F>(name) }.ok().map(|symbol| *symbol);
        if found.is_none() {
            missing.push(name);
        }
        found
    }

    /// Returns the error for a library that lacks functions. Such a library is usually too old.
    pub(super) fn missing_functions(&self, missing: &[&str]) -> Problem {
        let file = self.path.as_deref().unwrap_or(Path::new(self.name)).display();
        let reason = format!("{file} lacks {}", missing.join(", "));
        Problem { library: self.name, reason, remedy: self.remedy }
    }

    /// Opens a file in the folder of this library whose name starts with `prefix`, and keeps it open.
    pub(super) fn preload_sibling(&self, prefix: &str) {
        let Some(folder) = self.path.as_deref().and_then(Path::parent) else { return };
        for file in list(folder) {
            if starts_with(&file, prefix)
                && let Ok(handle) = open_file(&file)
            {
                std::mem::forget(handle);
                return;
            }
        }
    }
}

/// Declares a struct with one function pointer per symbol. Its `load` looks up each symbol.
macro_rules! functions {
    (
        $(#[$meta:meta])* $vis:vis struct $name:ident {
            $($field:ident = $symbol:ident($($arg:ty),* $(,)?) -> $ret:ty;)*
        }
    ) => {
        $(#[$meta])*
        $vis struct $name {
            /// The library, which stays open.
            library: $crate::cuda::load::SharedLibrary,
            $($vis $field: unsafe extern "C" fn($($arg),*) -> $ret,)*
        }

        impl $name {
            /// Looks up each symbol. The error names the missing symbols.
            fn load(
                library: $crate::cuda::load::SharedLibrary,
            ) -> std::result::Result<Self, $crate::cuda::load::Problem> {
                let mut missing = Vec::new();
                $(
                    // SAFETY: the signature is the signature of this symbol in NVIDIA's header.
                    let $field = unsafe {
                        library.function::<unsafe extern "C" fn($($arg),*) -> $ret>(stringify!($symbol), &mut missing)
                    };
                )*
                match ($($field,)*) {
                    ($(Some($field),)*) => Ok(Self { library, $($field,)* }),
                    _ => Err(library.missing_functions(&missing)),
                }
            }
        }
    };
}
pub(super) use functions;

/// The places where a library is searched, in order.
pub(super) struct SearchPath {
    /// The folders that the user named.
    pub(super) first: Vec<PathBuf>,
    /// Whether the dynamic linker searches by name.
    pub(super) linker: bool,
    /// The folders in which Python packages and toolkits keep the libraries.
    pub(super) then: Vec<PathBuf>,
}

impl SearchPath {
    /// Returns the search path of this process.
    pub(super) fn of_process() -> &'static SearchPath {
        static PATH: OnceLock<SearchPath> = OnceLock::new();
        PATH.get_or_init(|| SearchPath {
            first: variable_paths(LIBRARY_PATH_VARIABLE),
            linker: true,
            then: known_folders(),
        })
    }

    fn candidates(&self, sonames: &[&str]) -> Vec<PathBuf> {
        let inside = |folders: &[PathBuf]| -> Vec<PathBuf> {
            let files = folders.iter().flat_map(|folder| sonames.iter().map(move |name| folder.join(name)));
            files.filter(|file| file.exists()).collect()
        };
        let mut files = inside(&self.first);
        if self.linker {
            files.extend(sonames.iter().map(PathBuf::from));
        }
        files.extend(inside(&self.then));
        files
    }

    fn describe(&self) -> String {
        let own = match self.first.len() {
            0 => format!("{LIBRARY_PATH_VARIABLE} (not set)"),
            _ => LIBRARY_PATH_VARIABLE.to_string(),
        };
        format!("{own}, the linker's folders, and {} folders of Python packages and toolkits", self.then.len())
    }
}

fn variable_paths(variable: &str) -> Vec<PathBuf> {
    std::env::var_os(variable).map(|value| std::env::split_paths(&value).collect()).unwrap_or_default()
}

/// Describes the places where libraries are searched, as in the `problem` of a [`LibraryReport`].
pub fn searched_places() -> String {
    SearchPath::of_process().describe()
}

/// Returns the folders that are searched after the dynamic linker. Python packages come first, because they contain matching versions.
fn known_folders() -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for site in python_sites() {
        let mut packages = list(&site.join("nvidia"));
        // The unified folder of CUDA 13 comes before the folders per library.
        packages.sort_by_key(|package| (!starts_with(package, "cu1"), package.clone()));
        folders.extend(packages.iter().map(|package| package.join("lib")));
    }
    for toolkit in list(Path::new("/usr/local")).iter().filter(|folder| starts_with(folder, "cuda")) {
        folders.push(toolkit.join("lib64"));
        folders.push(toolkit.join("targets/x86_64-linux/lib"));
        folders.push(toolkit.join("targets/sbsa-linux/lib"));
    }
    for folder in ["/usr/local/nvidia/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib/wsl/lib"] {
        folders.push(PathBuf::from(folder));
    }
    folders.retain(|folder| folder.is_dir());
    folders
}

/// Returns the `site-packages` folders of four kinds of environments: the environment of this program (installed by `uv tool` or `pipx`, which add a
/// link to `PATH`), the active environment, the environment of each `python3` on `PATH`, and the system.
fn python_sites() -> Vec<PathBuf> {
    // The program is `PREFIX/bin/ottava` after links are resolved.
    let own = std::env::current_exe().and_then(|program| program.canonicalize()).ok();
    let own = own.as_deref().and_then(Path::parent).and_then(Path::parent).map(Path::to_path_buf);
    let active = ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(std::env::var_os).map(PathBuf::from);
    let mut prefixes: Vec<PathBuf> = own.into_iter().chain(active).collect();
    for folder in variable_paths("PATH") {
        let python = folder.join("python3");
        if python.exists() {
            prefixes.extend(folder.parent().map(Path::to_path_buf));
            // A link such as /usr/bin/python3 -> /opt/python/bin/python3.12 leads to the packages.
            let target = python.canonicalize().ok();
            prefixes.extend(target.as_deref().and_then(Path::parent).and_then(Path::parent).map(Path::to_path_buf));
        }
    }
    prefixes.extend(["/usr/local", "/usr"].map(PathBuf::from));

    let mut sites = variable_paths("PYTHONPATH");
    for prefix in prefixes {
        for lib in ["lib", "lib64"].map(|lib| prefix.join(lib)) {
            for python in list(&lib).iter().filter(|folder| starts_with(folder, "python3")) {
                sites.extend(["site-packages", "dist-packages"].map(|site| python.join(site)));
            }
        }
    }
    let mut seen = std::collections::HashSet::new();
    sites.retain(|site| site.is_dir() && seen.insert(site.clone()));
    sites
}

/// Returns the entries of a folder in the order of their names. The list is empty if the folder cannot be read.
fn list(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).map(|entries| entries.flatten().map(|entry| entry.path()).collect());
    let mut entries: Vec<PathBuf> = entries.unwrap_or_default();
    entries.sort();
    entries
}

fn starts_with(path: &Path, prefix: &str) -> bool {
    path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with(prefix))
}

fn open_file(file: &Path) -> Result<Library, String> {
    if file.is_absolute() {
        check_complete(file)?;
    }
    // SAFETY: opening a library runs its initialisers. Only libraries with NVIDIA's names are opened.
    unsafe { Library::open(Some(file), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| {
        // libloading keeps the linker's message in the source of the error.
        let words = std::error::Error::source(&error).map(ToString::to_string);
        words.unwrap_or_else(|| error.to_string())
    })
}

/// Rejects a truncated file. Such a file would crash the process when the linker reads past its end.
fn check_complete(file: &Path) -> Result<(), String> {
    let complain = |what: &str| format!("{} {what}", file.display());
    let mut header = [0u8; 64];
    let mut opened = std::fs::File::open(file).map_err(|error| complain(&error.to_string()))?;
    let length = opened.metadata().map_err(|error| complain(&error.to_string()))?.len();
    opened.read_exact(&mut header).map_err(|_| complain("is not an ELF library"))?;
    if &header[..4] != b"\x7fELF" {
        return Err(complain("is not an ELF library"));
    }
    let field = |at: usize, bytes: usize| {
        header[at..at + bytes].iter().rev().fold(0u64, |value, &byte| value << 8 | u64::from(byte))
    };
    // The fields of ELF64 are e_shoff, e_shentsize and e_shnum. The section headers are the last bytes of a library.
    let end = field(40, 8).saturating_add(field(58, 2) * field(60, 2));
    if end > length {
        return Err(complain(&format!("is truncated: {length} of {end} bytes")));
    }
    Ok(())
}

fn address_of(handle: &Library, name: &str) -> Option<*const c_void> {
    // SAFETY: the address is only compared and passed to dladdr, never called.
    unsafe { handle.get::<*const c_void>(name) }.ok().map(|symbol| *symbol)
}

/// Returns the file that contains an address, with resolved links.
fn file_of(address: *const c_void) -> Option<PathBuf> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: `info` is writable and dladdr accepts any address.
    let info = unsafe { (libc::dladdr(address, info.as_mut_ptr()) != 0).then(|| info.assume_init()) }?;
    if info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr returned a C string that lives as long as the library.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    let path = PathBuf::from(name.to_string_lossy().into_owned());
    Some(path.canonicalize().unwrap_or(path))
}

/// The report of `ottava doctor` about one library.
#[derive(Clone, Debug)]
pub struct LibraryReport {
    /// The usual name of the library.
    pub name: &'static str,
    /// The version, if the library was opened and reports a version.
    pub version: Option<String>,
    /// The file that the library was opened from.
    pub path: Option<PathBuf>,
    /// The reason why the library cannot be used, and `None` if it can.
    pub problem: Option<String>,
    /// The remedy if the library is missing.
    pub remedy: &'static str,
}

impl LibraryReport {
    /// Creates the report of an opened or missing library. `version` returns the version of an open library.
    pub(super) fn new<A>(
        wanted: &Wanted,
        opened: &Result<A, Problem>,
        library: impl Fn(&A) -> &SharedLibrary,
        version: impl Fn(&A) -> Option<String>,
    ) -> LibraryReport {
        LibraryReport {
            name: wanted.name,
            version: opened.as_ref().ok().and_then(version),
            path: opened.as_ref().ok().and_then(|api| library(api).path.clone()),
            problem: opened.as_ref().err().map(|problem| problem.reason.clone()),
            remedy: wanted.remedy,
        }
    }
}

/// Returns a version such as `91900` as `9.19.0`. cuBLASLt, cuDNN 9 and NCCL number versions this way.
pub(super) fn dotted(version: usize) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn only(folder: &Path) -> SearchPath {
        SearchPath { first: vec![folder.to_path_buf()], linker: false, then: vec![] }
    }

    fn refusal(folder: &Path) -> String {
        match SharedLibrary::open(&CUBLASLT, &only(folder)) {
            Ok(library) => panic!("{:?} was opened", library.path),
            Err(problem) => Error::from(problem).to_string(),
        }
    }

    #[test]
    fn a_missing_library_is_an_error_that_names_it_and_the_remedy() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let message = refusal(folder.path());
        for word in ["cuBLASLt", "libcublasLt.so.13", LIBRARY_PATH_VARIABLE, "pip install nvidia-cublas"] {
            assert!(message.contains(word), "{message}");
        }
    }

    #[test]
    fn broken_files_are_refused_with_their_paths() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("libcublasLt.so.13");
        // An HTML page, an empty file, and an ELF header of a larger file.
        let mut cut_short = vec![0u8; 64];
        cut_short[..4].copy_from_slice(b"\x7fELF");
        cut_short[40..48].copy_from_slice(&1_000_000u64.to_le_bytes());
        for (bytes, word) in [(&b"<html>"[..], "not an ELF"), (b"", "not an ELF"), (&cut_short, "truncated")] {
            std::fs::write(&file, bytes).expect("a file");
            let message = refusal(folder.path());
            assert!(message.contains(word) && message.contains("libcublasLt.so.13"), "{message}");
        }
        std::fs::remove_file(&file).expect("the file");
        std::fs::create_dir(&file).expect("a folder");
        refusal(folder.path());
    }

    #[test]
    fn a_library_without_the_functions_is_refused_and_all_are_named() {
        functions! {
            #[allow(dead_code, reason = "it never comes into being")]
            struct Absent {
                first = ottava_no_such_function() -> i32;
                second = ottava_nor_this_one(i32) -> i32;
            }
        }
        const LIBC: Wanted =
            Wanted { name: "libc", sonames: &["libc.so.6"], landmark: "malloc", remedy: "Use a usual Linux" };
        let linker = SearchPath { first: vec![], linker: true, then: vec![] };
        let Ok(library) = SharedLibrary::open(&LIBC, &linker) else {
            eprintln!("skipped: no libc.so.6");
            return;
        };
        assert!(library.path.as_deref().is_some_and(Path::is_absolute));
        let problem = Absent::load(library).err().expect("these functions exist nowhere");
        assert!(problem.reason.contains("ottava_no_such_function, ottava_nor_this_one"), "{}", problem.reason);
    }

    #[test]
    fn versions_are_dotted() {
        assert_eq!(dotted(91_900), "9.19.0");
        assert_eq!(dotted(130_100), "13.1.0");
        assert_eq!(dotted(22_803), "2.28.3");
    }
}
