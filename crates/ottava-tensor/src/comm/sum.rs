//! Sums in the order of the ranks.
//!
//! Sums of GPUs that NVLink connects are one-shot sums (`ops/sum_parts/one_shot.cu`): a kernel of the compute stream, without NCCL and without other
//! streams. Inference on several GPUs makes two of them per layer. Other sums exchange slices, add them and gather the sums, which takes more calls of
//! the driver. Both add in the same order, so that a row of a sum does not depend on the number of rows.

use super::call::{Call, Op, Reduce};
use super::gpu::Meeting;
use super::group::Group;
use crate::cuda::CudaDevice;
use crate::device::Device;
use crate::error::Result;
use crate::ops::{self, Inboxes, sum_parts_into};
use crate::tensor::Tensor;
use std::sync::Arc;

impl Group {
    /// Returns `addend + Σ x` over all ranks, with the shape of `x`. The values are added in rank order, then the addend, in F32 (F64 for F64), and
    /// rounded once, on every backend. All ranks give the same addend.
    ///
    /// It is for sums that are needed at once: nothing overlaps with it. For errors see [`Group`].
    pub fn sum(&self, name: &str, x: &Tensor, addend: Option<&Tensor>) -> Result<Tensor> {
        let call = self.call(Op::AllReduce(Reduce::Sum), name, x)?;
        let mut y = x.empty_like()?;
        if self.size() == 1 {
            sum_parts_into(x, 0, &Tensor::empty(x.device(), &[0], x.dtype())?, addend, &mut y)?;
            return Ok(y);
        }
        if x.is_empty() || self.sum_in_one_shot(&call, x, addend, &mut y)? {
            return Ok(y);
        }
        // The calls of the parts are counted as one all-reduce.
        let before = self.traffic();
        self.sum_by_parts(name, x, addend, &mut y)?;
        let mut traffic = self.endpoint.traffic();
        *traffic = before;
        traffic.count(&call, self.size());
        Ok(y)
    }

    /// Writes the sum to `y` by a kernel. Returns `false` if NVLink does not connect the GPUs, or if the sum is too large.
    fn sum_in_one_shot(&self, call: &Call, x: &Tensor, addend: Option<&Tensor>, y: &mut Tensor) -> Result<bool> {
        let Device::Cuda(device) = x.device() else { return Ok(false) };
        if !Inboxes::fits(x, self.size()) || !self.reaches(x.device())? {
            return Ok(false);
        }
        let Some(gpu) = &self.gpu else {
            // A dry run has no other ranks.
            self.note(call);
            return Ok(true);
        };
        self.communicator()?;
        let mut inboxes = gpu.inboxes();
        if let Meeting::Due = *inboxes {
            *inboxes = Meeting::Over(self.create_inboxes(device)?);
        }
        let Meeting::Over(Some(inboxes)) = &mut *inboxes else { return Ok(false) };
        self.note(call);
        ops::sum_in_one_shot(inboxes, x, addend, y)?;
        Ok(true)
    }

    /// Allocates the memory in which other ranks write their parts, and opens the memory of the other ranks. All ranks make this call. Returns `None`
    /// on all ranks if NVLink does not connect all GPUs, because other links may divide what a kernel stores at once.
    fn create_inboxes(&self, device: &Arc<CudaDevice>) -> Result<Option<Inboxes>> {
        self.expect_uncaptured(device)?;
        let peers = self.peers()?.expect("the ranks reach each other's memory");
        let uuids = self.agree("GPUs of sums", &peers.uuid())?;
        let own = self.together("looking for links of sums", peers.have_nvlink(&uuids))?;
        if self.agree("links of sums", &[u8::from(own)])?.iter().any(|have| have != &[1]) {
            if self.rank() == 0 && !peers.sees_all(&uuids)? {
                tracing::warn!(
                    "this process sees one GPU of its host, so it cannot tell whether NVLink connects the GPUs, and sums of inference are slower; \
                     let each process see all GPUs (CUDA_VISIBLE_DEVICES)"
                );
            }
            return Ok(None);
        }
        let addresses = device.count_library_memory(|| {
            let (own, exported) = self.together("memory of sums", peers.allocate(Inboxes::bytes(self.size())))?;
            let all = self.agree("addresses of sums", &exported)?;
            self.together("opening memory of sums", peers.open_for_good(own, &all))
        })?;
        Inboxes::new(&Device::Cuda(device.clone()), self.rank(), &addresses).map(Some)
    }

    /// Writes the sum to `y`: each rank adds one slice, and all gather the slices. If the ranks cannot divide the elements, they gather the parts.
    fn sum_by_parts(&self, name: &str, x: &Tensor, addend: Option<&Tensor>, y: &mut Tensor) -> Result<()> {
        let (rank, size, device, dtype) = (self.rank(), self.size(), x.device(), x.dtype());
        let flat = |x: &Tensor| x.reshape(&[x.len()]);
        if !x.len().is_multiple_of(size) {
            let mut all = self.symmetric(device, &[size, x.len()], dtype)?;
            all.copy_to_elements(rank * x.len(), &flat(x)?)?;
            let all = self.all_gather(name, all)?.wait()?;
            return sum_parts_into(&all.rows(0, 1)?.reshape(x.shape())?, 0, &all.rows(1, size)?, addend, y);
        }
        let slice = x.len() / size;
        let received = self.symmetric(device, &[size, slice], dtype)?;
        let parts = self.all_to_all(name, x, received)?.wait()?;
        let own_slice = |x: &Tensor| flat(x)?.rows(rank * slice, (rank + 1) * slice);
        let addend = addend.map(own_slice).transpose()?;
        let mut sum = Tensor::empty(device, &[slice], dtype)?;
        sum_parts_into(&flat(&parts.rows(0, 1)?)?, 0, &parts.rows(1, size)?, addend.as_ref(), &mut sum)?;
        drop(parts);
        let mut all = self.symmetric(device, &[x.len()], dtype)?;
        all.copy_to_elements(rank * slice, &sum)?;
        y.copy_to_elements(0, &self.all_gather(name, all)?.wait()?)
    }
}
