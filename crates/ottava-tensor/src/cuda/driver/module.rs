//! Modules of kernels.

use super::{Context, Handle};
use crate::error::{Error, Result};
use std::ffi::CString;
use std::ptr::null_mut;
use std::sync::Arc;

/// A loaded cubin.
pub(in crate::cuda) struct Module {
    context: Arc<Context>,
    module: Handle,
}

// SAFETY: a module handle may be used from any thread with its context bound.
unsafe impl Send for Module {}
// SAFETY: see `Send`. No field changes.
unsafe impl Sync for Module {}

impl Module {
    /// Loads a cubin compiled for this GPU.
    pub(in crate::cuda) fn load(context: &Arc<Context>, cubin: &[u8], name: &str) -> Result<Module> {
        context.bind()?;
        let mut module = null_mut();
        // SAFETY: a cubin is an ELF file and contains its own length. The driver copies it.
        let status = unsafe { (context.api.module_load)(&mut module, cubin.as_ptr().cast()) };
        context.check(status, &format!("loading kernels of {name}"))?;
        Ok(Module { context: context.clone(), module })
    }

    /// Returns a kernel of the module by its `extern "C"` name.
    pub(in crate::cuda) fn function(self: &Arc<Self>, name: &'static str) -> Result<Function> {
        self.context.bind()?;
        let c_name = CString::new(name).map_err(|_| Error::Value(format!("kernel name {name:?} holds a zero")))?;
        let mut function = null_mut();
        // SAFETY: the driver writes one handle, and the name ends with a zero.
        let status = unsafe { (self.context.api.module_function)(&mut function, self.module, c_name.as_ptr()) };
        self.context.check(status, &format!("looking up kernel {name}"))?;
        Ok(Function { _module: self.clone(), function, name })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: `load` loaded the module, and each of its functions holds it alive. Unloading waits for running kernels.
        unsafe {
            (self.context.api.context_set)(self.context.context);
            (self.context.api.module_unload)(self.module);
        }
    }
}

/// A kernel that is ready to launch.
#[derive(Clone)]
pub(in crate::cuda) struct Function {
    _module: Arc<Module>,
    pub(super) function: Handle,
    pub(super) name: &'static str,
}

// SAFETY: a function handle may be used from any thread with its context bound.
unsafe impl Send for Function {}
// SAFETY: see `Send`.
unsafe impl Sync for Function {}
