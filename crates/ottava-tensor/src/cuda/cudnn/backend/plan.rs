//! Plans of graphs. cuDNN's heuristics propose engines, and a plan runs on the stream of a session.

use super::numbers::{As, attribute, kind};
use super::{Api, Descriptor, Graph, Slot};
use crate::cuda::driver::Handle;
use crate::cuda::load::CUDNN;
use crate::error::{Error, Result};
use std::ffi::c_void;
use std::ptr::null_mut;

/// The heuristics of `cudnnBackendHeurMode_t` in the order of their use: A, then the fallback.
const HEURISTICS: [i32; 2] = [3, 2];
/// The maximum number of results of one heuristic that are tried.
const PROPOSALS: i64 = 16;

impl Graph {
    /// Returns a plan of the first heuristic result that cuDNN accepts.
    pub(in crate::cuda::cudnn) fn plan(self, on: On) -> Result<Plan> {
        let api = self.api;
        let operations: Vec<Handle> = self.operations.iter().map(|operation| operation.raw).collect();
        let mut graph = Descriptor::new(api, kind::OPERATION_GRAPH)?.set(
            attribute::GRAPH_OPERATIONS,
            As::Descriptor,
            &operations,
        )?;
        if let On::Session(session) = on {
            graph = graph.set(attribute::GRAPH_HANDLE, As::Handle, &[session.handle])?;
        }
        let graph = graph.finish("an operation graph")?;
        let mut refusals: Vec<String> = Vec::new();
        for mode in HEURISTICS {
            let configs = match self.proposals(&graph, mode, on) {
                Ok(configs) => configs,
                Err(error) => {
                    refusals.push(error.to_string());
                    continue;
                }
            };
            for config in configs {
                let plan =
                    Descriptor::new(api, kind::PLAN)?.set(attribute::PLAN_CONFIG, As::Descriptor, &[config.raw])?;
                let plan = match on {
                    On::Session(session) => plan.set(attribute::PLAN_HANDLE, As::Handle, &[session.handle])?,
                    On::Description(device) => plan.set(attribute::PLAN_DEVICE, As::Descriptor, &[device.0.raw])?,
                };
                match plan.finish("an execution plan") {
                    Ok(plan) => {
                        let workspace = workspace_of(&plan)?;
                        return Ok(Plan { plan, workspace, _parts: (self, graph, config) });
                    }
                    Err(error) => refusals.push(error.to_string()),
                }
            }
        }
        refusals.dedup();
        let message = if refusals.is_empty() { "no engine takes this graph".to_string() } else { refusals.join("; ") };
        Err(Error::Cuda { library: CUDNN.name, call: "planning attention".to_string(), message })
    }

    fn proposals(&self, graph: &Descriptor, mode: i32, on: On) -> Result<Vec<Descriptor>> {
        let api = self.api;
        let mut heuristics = Descriptor::new(api, kind::HEURISTICS)?
            .set(attribute::HEURISTICS_GRAPH, As::Descriptor, &[graph.raw])?
            .set(attribute::HEURISTICS_MODE, As::HeuristicMode, &[mode])?;
        if let On::Description(device) = on {
            heuristics = heuristics.set(attribute::HEURISTICS_DEVICE, As::Descriptor, &[device.0.raw])?;
        }
        let heuristics = heuristics.finish("heuristics")?;
        let get = |count: i64, found: &mut i64, into: *mut c_void| {
            // SAFETY: the library writes at most `count` results into existing descriptors, and writes the number of results.
            let status = unsafe {
                (api.get)(heuristics.raw, attribute::HEURISTICS_RESULTS, As::Descriptor as i32, count, found, into)
            };
            api.check(status, "the results of the heuristics")
        };
        let mut found = 0;
        get(0, &mut found, null_mut())?;
        let wanted = found.clamp(0, PROPOSALS);
        let mut configs = (0..wanted).map(|_| Descriptor::new(api, kind::ENGINE_CONFIG)).collect::<Result<Vec<_>>>()?;
        let mut raw: Vec<Handle> = configs.iter().map(|config| config.raw).collect();
        get(wanted, &mut found, raw.as_mut_ptr().cast())?;
        configs.truncate(found.max(0) as usize);
        Ok(configs)
    }
}

fn workspace_of(plan: &Descriptor) -> Result<usize> {
    let (mut bytes, mut count) = (0i64, 0i64);
    // SAFETY: the library writes one 64-bit integer.
    let status = unsafe {
        let into = (&raw mut bytes).cast();
        (plan.api.get)(plan.raw, attribute::PLAN_WORKSPACE, As::I64 as i32, 1, &mut count, into)
    };
    plan.api.check(status, "the workspace of a plan")?;
    Ok(bytes.max(0) as usize)
}

/// A cuDNN handle for one stream.
pub(in crate::cuda::cudnn) struct Session {
    api: &'static Api,
    handle: Handle,
}

impl Session {
    /// Opens cuDNN for a stream of the current context.
    pub(in crate::cuda::cudnn) fn open(api: &'static Api, stream: Handle) -> Result<Session> {
        let mut session = Session { api, handle: null_mut() };
        // SAFETY: the library writes one handle, which `Drop` destroys.
        api.check(unsafe { (api.create_handle)(&mut session.handle) }, "cudnnCreate")?;
        // SAFETY: the handle was just created.
        api.check(unsafe { (api.set_stream)(session.handle, stream) }, "cudnnSetStream")?;
        Ok(session)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: `open` created the handle, and nothing uses it afterwards.
        unsafe { (self.api.destroy_handle)(self.handle) };
    }
}

/// The properties of a GPU, which need not be present.
pub(in crate::cuda::cudnn) struct DeviceDescription(Descriptor);

impl DeviceDescription {
    /// Reads the properties of a device from cuDNN's JSON.
    pub(in crate::cuda::cudnn) fn read(api: &'static Api, json: &str) -> Result<DeviceDescription> {
        let device = Descriptor::new(api, kind::DEVICE_PROPERTIES)?;
        let device = device.set(attribute::DEVICE_JSON, As::Char, json.as_bytes())?;
        Ok(DeviceDescription(device.finish("device properties")?))
    }
}

/// The target of a plan.
#[derive(Clone, Copy)]
pub(in crate::cuda::cudnn) enum On<'a> {
    /// The device of a session.
    Session(&'a Session),
    /// A device that need not be present.
    Description(&'a DeviceDescription),
}

/// An execution plan.
pub(in crate::cuda::cudnn) struct Plan {
    plan: Descriptor,
    /// The size of the workspace in bytes.
    pub(in crate::cuda::cudnn) workspace: usize,
    /// The descriptors that the plan refers to.
    _parts: (Graph, Descriptor, Descriptor),
}

impl Plan {
    /// Enqueues the graph.
    ///
    /// # Safety
    /// Each slot of the graph has a pointer to memory of its shape. The scalars of [`Slot`] are host memory.
    pub(in crate::cuda::cudnn) unsafe fn enqueue(
        &self,
        session: &Session,
        bindings: &[(Slot, u64)],
        workspace: u64,
    ) -> Result<()> {
        let ids: Vec<i64> = bindings.iter().map(|(slot, _)| *slot as i64).collect();
        let pointers: Vec<u64> = bindings.iter().map(|(_, pointer)| *pointer).collect();
        let api = self.plan.api;
        let pack = Descriptor::new(api, kind::VARIANT_PACK)?
            .set(attribute::PACK_IDS, As::I64, &ids)?
            .set(attribute::PACK_POINTERS, As::Pointer, &pointers)?
            .set(attribute::PACK_WORKSPACE, As::Pointer, &[workspace])?
            .finish("a set of pointers")?;
        // SAFETY: the caller's promise.
        api.check(unsafe { (api.execute)(session.handle, self.plan.raw, pack.raw) }, "cudnnBackendExecute")
    }
}
