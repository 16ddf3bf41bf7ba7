//! The features, FP8 products and kernels that a GPU supports, from the table of compute capabilities.

use ottava_common::error::Result;
use ottava_tensor::Capability;
use ottava_tensor::cuda::GpuModel;
use ottava_tensor::ops::kernel_support;
use serde::Serialize;

/// The part of a plan that depends only on the GPU.
#[derive(Clone, Debug, Serialize)]
pub struct GpuPlan {
    /// The name of the GPU.
    pub name: String,
    /// The compute capability, major and minor.
    pub capability: (i32, i32),
    /// The name of the architecture.
    pub architecture: &'static str,
    /// Whether this project's tests have run on this compute capability. If not, the data are from NVIDIA's documents.
    pub is_tested: bool,
    /// The features that compute capability 8.0 does not have.
    pub features: Vec<&'static str>,
    /// The scales that FP8 products support.
    pub fp8_products: Vec<String>,
    /// The bytes of shared memory that a block may use.
    pub shared_bytes: usize,
    /// The ops that can run all their kernels.
    pub kernels: Vec<&'static str>,
    /// A sentence for each op that cannot run all its kernels.
    pub missing: Vec<String>,
}

impl GpuPlan {
    /// Returns the part of a plan for `gpu`. Errors if its compute capability is not known.
    pub fn new(gpu: &GpuModel) -> Result<GpuPlan> {
        let capability = Capability::find(gpu.capability)?;
        let (whole, partial): (Vec<_>, Vec<_>) =
            kernel_support(capability).into_iter().partition(|op| op.unsupported == 0);
        Ok(GpuPlan {
            name: gpu.name.clone(),
            capability: capability.version,
            architecture: capability.architecture,
            is_tested: capability.is_tested,
            features: capability.features.iter().map(|feature| feature.name()).collect(),
            fp8_products: capability.fp8_products.iter().map(ToString::to_string).collect(),
            shared_bytes: capability.shared_bytes,
            kernels: whole.iter().map(|op| op.op).collect(),
            missing: partial
                .iter()
                .map(|op| {
                    let lacks: Vec<_> = op.lacks.iter().map(|feature| feature.name()).collect();
                    format!("{}: {} of {} variants need {}", op.op, op.unsupported, op.modules, lacks.join(", "))
                })
                .collect(),
        })
    }
}
