//! The functions of cuBLASLt, and its handle.

use super::choices::Algorithm;
use crate::cuda::driver::{Context, Handle, library_error, supported};
use crate::cuda::load::{CUBLASLT, LibraryReport, Problem, SearchPath, SharedLibrary, dotted, functions};
use crate::error::Result;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock};

/// An algorithm and the resources that it needs (`cublasLtMatmulHeuristicResult_t`).
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Candidate {
    pub(super) algorithm: Algorithm,
    pub(super) workspace: usize,
    pub(super) state: i32,
    pub(super) waves: f32,
    pub(super) reserved: [i32; 4],
}

functions! {
    pub(super) struct Api {
        version = cublasLtGetVersion() -> usize;
        status_string = cublasLtGetStatusString(i32) -> *const c_char;
        create = cublasLtCreate(*mut Handle) -> i32;
        destroy = cublasLtDestroy(Handle) -> i32;
        desc_create = cublasLtMatmulDescCreate(*mut Handle, i32, i32) -> i32;
        desc_destroy = cublasLtMatmulDescDestroy(Handle) -> i32;
        desc_set = cublasLtMatmulDescSetAttribute(Handle, i32, *const c_void, usize) -> i32;
        layout_create = cublasLtMatrixLayoutCreate(*mut Handle, i32, u64, u64, i64) -> i32;
        layout_destroy = cublasLtMatrixLayoutDestroy(Handle) -> i32;
        preference_create = cublasLtMatmulPreferenceCreate(*mut Handle) -> i32;
        preference_destroy = cublasLtMatmulPreferenceDestroy(Handle) -> i32;
        preference_set = cublasLtMatmulPreferenceSetAttribute(Handle, i32, *const c_void, usize) -> i32;
        heuristics = cublasLtMatmulAlgoGetHeuristic(
            Handle, Handle, Handle, Handle, Handle, Handle, Handle, i32, *mut Candidate, *mut i32,
        ) -> i32;
        config_get = cublasLtMatmulAlgoConfigGetAttribute(*const Algorithm, i32, *mut c_void, usize, *mut usize) -> i32;
        config_set = cublasLtMatmulAlgoConfigSetAttribute(*mut Algorithm, i32, *const c_void, usize) -> i32;
        check = cublasLtMatmulAlgoCheck(
            Handle, Handle, Handle, Handle, Handle, Handle, *const Algorithm, *mut Candidate,
        ) -> i32;
        matmul = cublasLtMatmul(
            Handle, Handle, *const c_void, u64, Handle, u64, Handle, *const c_void, u64, Handle, u64, Handle,
            *const Algorithm, u64, usize, Handle,
        ) -> i32;
    }
}

/// The size in bytes of the workspace that NVIDIA recommends for Hopper.
pub(super) const WORKSPACE: usize = 32 << 20;

fn opened() -> &'static Result<Api, Problem> {
    static OPENED: OnceLock<Result<Api, Problem>> = OnceLock::new();
    OPENED.get_or_init(|| SharedLibrary::open(&supported(&CUBLASLT), SearchPath::of_process()).and_then(Api::load))
}

/// Opens cuBLASLt. Returns an error if the library is missing.
pub(in crate::cuda) fn require() -> Result<()> {
    api().map(|_| ())
}

pub(super) fn api() -> Result<&'static Api> {
    opened().as_ref().map_err(|problem| problem.clone().into())
}

impl Api {
    pub(super) fn version_text(&self) -> String {
        // SAFETY: the function takes no pointers.
        dotted(unsafe { (self.version)() })
    }
}

pub(in crate::cuda) fn report() -> LibraryReport {
    LibraryReport::new(&CUBLASLT, opened(), |api| &api.library, |api| Some(api.version_text()))
}

/// The library handle and its context.
pub(super) struct Lt {
    pub(super) api: &'static Api,
    pub(super) handle: Handle,
    pub(super) context: Arc<Context>,
}

impl Drop for Lt {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: `Lt::open` created the handle, and nothing uses it afterwards.
        unsafe { (self.api.destroy)(self.handle) };
    }
}

impl Lt {
    /// Opens the library for a context, and makes the context current in this thread.
    pub(super) fn open(context: &Arc<Context>) -> Result<Lt> {
        let api = api()?;
        context.bind()?;
        let mut library = Lt { api, handle: null_mut(), context: context.clone() };
        // SAFETY: the library writes one handle, which `Drop` destroys.
        let status = unsafe { (api.create)(&mut library.handle) };
        library.check(status, "cublasLtCreate")?;
        Ok(library)
    }

    pub(super) fn check(&self, status: i32, call: &str) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the library returns a constant string for each status.
        let text = unsafe { (self.api.status_string)(status) };
        let message = if text.is_null() {
            format!("status {status}")
        } else {
            // SAFETY: the pointer is not null, and the string is constant.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        Err(library_error(&self.context, CUBLASLT.name, call, message))
    }
}
