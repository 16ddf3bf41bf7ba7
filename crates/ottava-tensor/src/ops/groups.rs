//! The groups of rows of a matrix.

use crate::ops::declaration::Address;
use crate::{DType, Device, Result, Tensor};

/// The rows of a matrix `[P, …]` that belong to each of `G` groups. Both tensors are on the device of the matrix. The host does not read them, so a
/// captured step may change them.
#[derive(Clone, Debug)]
pub struct Groups {
    /// The offsets, I32 `[G + 1]`: the first row of each group, in ascending multiples of [`Groups::ALIGNMENT`], and last the end of the last group.
    pub offsets: Tensor,
    /// The numbers of rows of the groups, I32 `[G]`. Rows between the end of a group and the next group are padding, which must be zeros in operands.
    pub counts: Tensor,
}

impl Groups {
    /// The alignment of groups: each group begins at a multiple of this number of rows.
    pub const ALIGNMENT: usize = 128;

    /// Returns groups of these sizes, one after the other.
    pub fn new(device: &Device, counts: &[usize]) -> Result<Groups> {
        let mut offsets = vec![0i32];
        for count in counts {
            offsets.push(offsets[offsets.len() - 1] + count.next_multiple_of(Groups::ALIGNMENT) as i32);
        }
        let counts: Vec<i32> = counts.iter().map(|&count| count as i32).collect();
        Ok(Groups {
            offsets: Tensor::from_slice(device, &[offsets.len()], &offsets)?,
            counts: Tensor::from_slice(device, &[counts.len()], &counts)?,
        })
    }

    /// Returns the number of rows that suffices for `rows` rows in `groups` groups, whatever the sizes of the groups are.
    pub fn capacity(rows: usize, groups: usize) -> usize {
        (rows + (Groups::ALIGNMENT - 1) * groups.min(rows)) / Groups::ALIGNMENT * Groups::ALIGNMENT
    }

    /// Returns the number of groups.
    pub fn len(&self) -> usize {
        self.counts.len()
    }

    /// Returns true if there are no groups.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns `matrix` as rows of these groups.
    pub fn rows<'a>(&'a self, matrix: &'a Tensor) -> GroupedRows<'a> {
        GroupedRows { matrix, groups: Some(self) }
    }

    /// Returns the address of the end of the last group, on a GPU.
    pub(in crate::ops) fn end(&self) -> Address {
        Address(self.offsets.device_ptr() + (self.len() * self.offsets.dtype().size()) as u64)
    }

    /// Checks types, shapes and the device.
    pub(in crate::ops) fn expect(&self, what: &str, device: &Device) -> Result<()> {
        self.offsets.expect(what, &[self.len() + 1])?;
        for tensor in [&self.offsets, &self.counts] {
            tensor.expect_dtype(what, &[DType::I32])?;
            tensor.expect_device(what, device)?;
        }
        Ok(())
    }
}

/// A matrix for ops that compute each row alone. If its rows belong to groups, kernels skip the rows after the last group: such ops neither read these
/// rows nor write the rows of results.
#[derive(Clone, Copy, Debug)]
pub struct GroupedRows<'a> {
    pub(in crate::ops) matrix: &'a Tensor,
    pub(in crate::ops) groups: Option<&'a Groups>,
}

impl<'a> From<&'a Tensor> for GroupedRows<'a> {
    fn from(matrix: &'a Tensor) -> GroupedRows<'a> {
        GroupedRows { matrix, groups: None }
    }
}

/// Returns the address of the end of the last group on a GPU, or null without groups.
pub(in crate::ops) fn end_of(groups: Option<&Groups>) -> Address {
    groups.map_or(Address::default(), Groups::end)
}
