//! The division of the multiprocessors of a GPU between communication and compute.

/// The work of the compute stream during the calls of a communicator. The number of CTAs of a call determines how fast the call is and how much it
/// slows kernels that run at the same time. Calls run on a stream of their own only in a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Beside {
    /// The compute stream runs many kernels, and none of these kernels waits soon for the calls.
    Kernels,
    /// The compute stream runs one product, which leaves multiprocessors to the calls
    /// ([`CudaDevice::beside_collectives`](super::CudaDevice::beside_collectives)).
    Product,
    /// The compute stream waits for the calls.
    Nothing,
    /// The compute stream runs kernels while messages of this channel wait for their peer.
    Channel(usize),
}

impl Beside {
    /// The number of multiprocessors that a product leaves to concurrent messages. It is the maximum number of CTAs for [`Beside::Product`].
    pub(super) const SPARED: usize = 24;

    /// Returns the maximum number of CTAs of a call, from measurements on two H200 (docs/parallelism.md). The number for [`Beside::Channel`] is not
    /// measured.
    pub(super) fn most_ctas(self) -> i32 {
        match self {
            // With 16 CTAs, 207 µs of a reduce-scatter are not hidden by the products of a block. With the library's choice, 270 µs are not hidden.
            Beside::Kernels => 16,
            Beside::Product => Beside::SPARED as i32,
            Beside::Nothing => 32,
            Beside::Channel(_) => 2,
        }
    }

    /// Returns the number of CTAs per cluster, 0 for no clusters and `None` for the library's choice. A cluster needs free multiprocessors that are
    /// neighbours. The multiprocessors that a product leaves free may not be neighbours. With the library's clusters of four CTAs, messages started
    /// only when the concurrent product had ended.
    pub(super) fn cluster(self) -> Option<i32> {
        (self == Beside::Product).then_some(0)
    }
}
