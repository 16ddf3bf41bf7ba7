//! Contiguous, row-major arrays. Views share storage. Only tensors that do not share their storage are written.

mod suspended;

pub use suspended::Suspended;

use crate::cuda::{DeviceBuffer, Event, PinnedBuffer};
use crate::device::{Device, MemoryKind, Storage};
use crate::dtype::DType;
use crate::element::Element;
use crate::error::{Error, Result};
use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// A contiguous, row-major array on one device. Cloning shares the storage.
#[derive(Clone)]
pub struct Tensor {
    storage: Arc<Storage>,
    device: Device,
    /// The offset of the first element in the storage, in elements.
    offset: usize,
    shape: Box<[usize]>,
    dtype: DType,
}

impl Tensor {
    /// Creates an uninitialised tensor.
    pub fn empty(device: &Device, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        let storage = Arc::new(device.allocate(bytes)?);
        Ok(Tensor { storage, device: device.clone(), offset: 0, shape: shape.into(), dtype })
    }

    /// Creates a tensor of zeros.
    pub fn zeros(device: &Device, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let mut tensor = Tensor::empty(device, shape, dtype)?;
        tensor.fill_zero()?;
        Ok(tensor)
    }

    /// Creates a tensor of zeros, in device memory or pinned host memory.
    pub fn zeros_in(device: &Device, shape: &[usize], dtype: DType, home: MemoryKind) -> Result<Tensor> {
        match home {
            MemoryKind::Device => Tensor::zeros(device, shape, dtype),
            MemoryKind::Host => {
                let storage = Arc::new(device.allocate_in_host(shape.iter().product::<usize>() * dtype.size())?);
                Ok(Tensor { storage, device: device.clone(), offset: 0, shape: shape.into(), dtype })
            }
        }
    }

    /// Copies `values`, row by row, to `device`. Errors if their number is not the product of `shape`.
    pub fn from_slice<T: Element>(device: &Device, shape: &[usize], values: &[T]) -> Result<Tensor> {
        Tensor::from_bytes(device, shape, T::DTYPE, bytemuck::cast_slice(values))
    }

    /// Copies the little-endian bytes of elements to `device`. Errors if their number does not fit shape and type.
    pub fn from_bytes(device: &Device, shape: &[usize], dtype: DType, bytes: &[u8]) -> Result<Tensor> {
        let expected = shape.iter().product::<usize>() * dtype.size();
        if bytes.len() != expected {
            return Err(Error::Value(format!(
                "a {dtype} tensor of shape {shape:?} takes {expected} bytes, {} were given",
                bytes.len()
            )));
        }
        let mut tensor = Tensor::empty(device, shape, dtype)?;
        tensor.write_bytes(bytes)?;
        Ok(tensor)
    }

    /// Creates a tensor with the device, shape and type of `self`. Its content is undefined.
    pub fn empty_like(&self) -> Result<Tensor> {
        Tensor::empty(&self.device, &self.shape, self.dtype)
    }

    /// Returns the device of the tensor.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns whether the tensor is in device memory or host memory.
    pub fn memory_kind(&self) -> MemoryKind {
        match &*self.storage {
            Storage::Pinned(_) => MemoryKind::Host,
            Storage::Host(_) | Storage::Cuda(_) | Storage::Dry(_) => MemoryKind::Device,
        }
    }

    /// Returns the lengths of the dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns whether the tensor has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> usize {
        self.len() * self.dtype.size()
    }

    /// Returns the shape as an array. If the number of dimensions is not `N`, errors with `what`, which names op and argument.
    pub fn dims<const N: usize>(&self, what: &str) -> Result<[usize; N]> {
        self.shape.as_ref().try_into().map_err(|_| Error::Shape {
            what: what.into(),
            expected: format!("{N} dimensions"),
            got: self.shape.to_vec(),
        })
    }

    /// Errors unless the tensor has this shape.
    pub fn expect(&self, what: &str, shape: &[usize]) -> Result<()> {
        if *self.shape == *shape {
            return Ok(());
        }
        Err(Error::Shape { what: what.into(), expected: format!("{shape:?}"), got: self.shape.to_vec() })
    }

    /// Errors unless the element type is one of `dtypes`.
    pub fn expect_dtype(&self, what: &str, dtypes: &[DType]) -> Result<()> {
        if dtypes.contains(&self.dtype) {
            return Ok(());
        }
        let names: Vec<_> = dtypes.iter().map(|d| d.name()).collect();
        Err(Error::DType { what: what.into(), expected: names.join(" or "), got: self.dtype })
    }

    /// Errors unless the tensor is on `device`.
    pub fn expect_device(&self, what: &str, device: &Device) -> Result<()> {
        if self.device.same(device) {
            return Ok(());
        }
        Err(Error::Placement { what: what.into(), expected: device.to_string(), got: self.device.to_string() })
    }

    /// Returns the same elements in another shape of the same size.
    pub fn reshape(&self, shape: &[usize]) -> Result<Tensor> {
        if shape.iter().product::<usize>() != self.len() {
            return Err(Error::Shape {
                what: "reshape".into(),
                expected: format!("as many elements as {shape:?}"),
                got: self.shape.to_vec(),
            });
        }
        Ok(Tensor { shape: shape.into(), ..self.clone() })
    }

    /// Returns the entries `start..end` along the first dimension. The result shares the storage.
    pub fn rows(&self, start: usize, end: usize) -> Result<Tensor> {
        if self.shape.is_empty() || start > end || end > self.shape[0] {
            return Err(Error::Value(format!(
                "rows {start}..{end} do not exist in a tensor of shape {:?}",
                self.shape
            )));
        }
        let row: usize = self.shape[1..].iter().product();
        let mut view = self.clone();
        view.offset += start * row;
        view.shape[0] = end - start;
        Ok(view)
    }

    /// Divides this tensor, which must not be shared, into `ranges` of elements, which ascend and do not overlap. Each part is a tensor `[n]` that is
    /// written independently. Elements between the ranges have no owner until [`Tensor::join`].
    pub fn split(self, ranges: &[Range<usize>]) -> Result<Vec<Tensor>> {
        let Tensor { storage, device, offset, dtype, .. } = self;
        let storage = Arc::into_inner(storage).filter(|storage| offset == 0 && !matches!(storage, Storage::Pinned(_)));
        let storage = storage.ok_or_else(|| Error::Value("split: the tensor has views, or is one".into()))?;
        let bytes: Vec<_> = ranges.iter().map(|r| r.start * dtype.size()..r.end * dtype.size()).collect();
        let part = |(storage, range): (Storage, &Range<usize>)| Tensor {
            storage: Arc::new(storage),
            device: device.clone(),
            offset: 0,
            shape: [range.len()].into(),
            dtype,
        };
        Ok(storage.split(&bytes)?.into_iter().zip(ranges).map(part).collect())
    }

    /// Returns the tensor `[n]` that was split into `parts`. They may come in any order and in any shapes. Errors if a part is missing or has views.
    pub fn join(parts: Vec<Tensor>) -> Result<Tensor> {
        let first = parts.first().ok_or_else(|| Error::Value("join: there are no parts".into()))?;
        let (device, dtype) = (first.device.clone(), first.dtype);
        let unshared = |part: Tensor| Arc::into_inner(part.storage);
        let storages: Option<Vec<_>> = parts.into_iter().map(unshared).collect();
        let storages = storages.ok_or_else(|| Error::Value("join: a part has views".into()))?;
        let storage = Arc::new(Storage::join(storages)?);
        let shape = [storage.bytes() / dtype.size()].into();
        Ok(Tensor { storage, device, offset: 0, shape, dtype })
    }

    /// Returns a copy on `device`.
    pub fn to_device(&self, device: &Device) -> Result<Tensor> {
        let bytes = match &*self.storage {
            Storage::Host(buffer) => Cow::Borrowed(&buffer.as_slice()[self.byte_range()]),
            Storage::Cuda(_) | Storage::Pinned(_) | Storage::Dry(_) => Cow::Owned(self.read_bytes()?),
        };
        Tensor::from_bytes(device, &self.shape, self.dtype, &bytes)
    }

    /// Returns a copy with separate storage on the same device.
    pub fn duplicate(&self) -> Result<Tensor> {
        let mut copy = self.empty_like()?;
        copy.copy_from(0, self)?;
        Ok(copy)
    }

    /// Returns the elements, copied to the host. `T` must be the element type.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        self.expect_dtype("to_vec", &[T::DTYPE])?;
        let mut values = vec![T::zeroed(); self.len()];
        self.read_into(bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }

    /// Returns the bytes of the elements, copied to the host.
    pub fn read_bytes(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.bytes()];
        self.read_into(&mut bytes)?;
        Ok(bytes)
    }

    fn read_into(&self, out: &mut [u8]) -> Result<()> {
        match &*self.storage {
            Storage::Host(buffer) => {
                out.copy_from_slice(&buffer.as_slice()[self.byte_range()]);
                Ok(())
            }
            Storage::Cuda(buffer) => buffer.read(self.byte_range().start, out),
            Storage::Pinned(buffer) => buffer.read(self.byte_range().start, out),
            Storage::Dry(_) => {
                out.fill(0);
                Ok(())
            }
        }
    }

    /// Copies the bytes of the elements to byte `at` of host memory `to`. The host may read them after the returned event, or at once if there is none.
    /// Later work of the device may change the tensor.
    pub(crate) fn copy_to_host(&self, to: &mut Storage, at: usize) -> Result<Option<Event>> {
        let range = self.byte_range();
        match (to, &*self.storage) {
            (Storage::Pinned(to), Storage::Cuda(from)) => to.copy_from(at, from, range),
            (Storage::Pinned(to), _) => {
                to.host_bytes_mut(at..at + range.len()).map_or(Ok(()), |to| self.read_into(to)).map(|()| None)
            }
            (Storage::Host(to), _) => self.read_into(&mut to.as_mut_slice()[at..at + range.len()]).map(|()| None),
            (Storage::Dry(_), _) => Ok(None),
            (Storage::Cuda(_), _) => unreachable!("host memory was asked for"),
        }
    }

    /// Replaces all elements by the elements in `bytes`.
    pub fn write_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        let range = self.byte_range();
        assert_eq!(range.len(), bytes.len(), "write_bytes covers the whole tensor");
        match self.storage_mut() {
            Storage::Host(buffer) => buffer.as_mut_slice()[range].copy_from_slice(bytes),
            Storage::Cuda(buffer) => buffer.write(range.start, bytes)?,
            Storage::Pinned(buffer) => buffer.write(range.start, bytes)?,
            Storage::Dry(_) => {}
        }
        Ok(())
    }

    /// Sets every element to zero.
    pub fn fill_zero(&mut self) -> Result<()> {
        let range = self.byte_range();
        match self.storage_mut() {
            Storage::Host(buffer) => buffer.as_mut_slice()[range].fill(0),
            Storage::Cuda(buffer) => buffer.fill_zero(range.start, range.len())?,
            Storage::Pinned(buffer) => buffer.write(range.start, &vec![0; range.len()])?,
            Storage::Dry(_) => {}
        }
        Ok(())
    }

    /// Copies all of `source` (same type and device) over the elements from row `row` on.
    pub fn copy_from(&mut self, row: usize, source: &Tensor) -> Result<()> {
        let width: usize = self.shape.iter().skip(1).product();
        self.copy_to_elements(row * width, source)
    }

    /// Copies `source` like [`Tensor::copy_from`], over the elements from index `start` on.
    pub(crate) fn copy_to_elements(&mut self, start: usize, source: &Tensor) -> Result<()> {
        source.expect_dtype("copy_from: source", &[self.dtype])?;
        source.expect_device("copy_from: source", &self.device)?;
        if start + source.len() > self.len() {
            return Err(Error::Value(format!(
                "a tensor of shape {:?} does not fit into one of shape {:?} from element {start} on",
                source.shape, self.shape
            )));
        }
        let at = self.byte_range().start + start * self.dtype.size();
        let (bytes, expected) = (source.bytes(), self.device.to_string());
        match (self.storage_mut(), &*source.storage) {
            (Storage::Host(to), Storage::Host(from)) => {
                to.as_mut_slice()[at..at + bytes].copy_from_slice(&from.as_slice()[source.byte_range()]);
                Ok(())
            }
            (Storage::Dry(_), Storage::Dry(_)) => Ok(()),
            (to, from) => match (to.on_device_mut(), from.on_device()) {
                (Some(to), Some(from)) => to.copy_from(at, from, source.byte_range().start, bytes),
                _ => {
                    let got = "the host's memory, from where it was not fetched".into();
                    Err(Error::Placement { what: "copy_from".into(), expected, got })
                }
            },
        }
    }

    /// Returns the elements of a CPU tensor. The op has checked device and type.
    pub(crate) fn host<T: Element>(&self) -> &[T] {
        assert_eq!(self.dtype, T::DTYPE, "a CPU op reads the type it checked");
        match &*self.storage {
            Storage::Host(buffer) => bytemuck::cast_slice(&buffer.as_slice()[self.byte_range()]),
            Storage::Cuda(_) | Storage::Pinned(_) | Storage::Dry(_) => {
                unreachable!("a CPU op was given a tensor that lies elsewhere")
            }
        }
    }

    /// Returns the elements of a CPU tensor for writing.
    pub(crate) fn host_mut<T: Element>(&mut self) -> &mut [T] {
        assert_eq!(self.dtype, T::DTYPE, "a CPU op writes the type it checked");
        let range = self.byte_range();
        match self.storage_mut() {
            Storage::Host(buffer) => bytemuck::cast_slice_mut(&mut buffer.as_mut_slice()[range]),
            Storage::Cuda(_) | Storage::Pinned(_) | Storage::Dry(_) => {
                unreachable!("a CPU op was given a tensor that lies elsewhere")
            }
        }
    }

    /// Returns the pinned buffer of a tensor in host memory, or `None` for other tensors.
    pub(crate) fn pinned_mut(&mut self) -> Option<&mut PinnedBuffer> {
        match &*self.storage {
            Storage::Pinned(_) => match self.storage_mut() {
                Storage::Pinned(buffer) => Some(buffer),
                _ => unreachable!("seen above"),
            },
            _ => None,
        }
    }

    /// Returns the pinned buffer, if the tensor is in host memory and covers the whole buffer.
    pub(crate) fn pinned(&self) -> Option<&PinnedBuffer> {
        match &*self.storage {
            Storage::Pinned(buffer) if buffer.len() == self.bytes() => Some(buffer),
            _ => None,
        }
    }

    /// Returns a tensor of the same shape and type over `buffer`.
    pub(crate) fn with_buffer(&self, buffer: DeviceBuffer) -> Tensor {
        Tensor { storage: Arc::new(Storage::Cuda(buffer)), offset: 0, ..self.clone() }
    }

    /// Creates a tensor over `buffer`, which must have the tensor's number of bytes.
    pub(crate) fn over(buffer: DeviceBuffer, shape: &[usize], dtype: DType) -> Tensor {
        let device = Device::Cuda(buffer.device().clone());
        Tensor { storage: Arc::new(Storage::Cuda(buffer)), device, offset: 0, shape: shape.into(), dtype }
    }

    /// Returns the device buffer, if the tensor covers all of it.
    pub(crate) fn whole_buffer(&self) -> Option<&DeviceBuffer> {
        match &*self.storage {
            Storage::Cuda(buffer) if buffer.len() == self.bytes() => Some(buffer),
            _ => None,
        }
    }

    /// Returns the device address of the first element. The op has checked the device.
    pub(crate) fn device_ptr(&self) -> u64 {
        match &*self.storage {
            Storage::Host(_) | Storage::Dry(_) => unreachable!("a kernel was given a CPU tensor"),
            Storage::Cuda(buffer) => buffer.ptr() + self.byte_range().start as u64,
            Storage::Pinned(buffer) => buffer.ptr() + self.byte_range().start as u64,
        }
    }

    /// Returns the address of [`Tensor::device_ptr`] for writing.
    pub(crate) fn device_ptr_mut(&mut self) -> u64 {
        self.storage_mut();
        self.device_ptr()
    }

    fn byte_range(&self) -> Range<usize> {
        let start = self.offset * self.dtype.size();
        start..start + self.bytes()
    }

    /// Returns whether the storage is in device memory.
    pub(crate) fn is_on_gpu(&self) -> bool {
        matches!(&*self.storage, Storage::Cuda(_))
    }

    /// Returns the memory of a tensor that is not shared, for writing.
    pub(crate) fn storage_mut(&mut self) -> &mut Storage {
        Arc::get_mut(&mut self.storage).expect("a tensor that is written has no other views")
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({} {:?} on {})", self.dtype, self.shape, self.device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_share_and_copies_do_not() {
        let mut x = Tensor::from_slice(&Device::Cpu, &[3, 2], &[1f32, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
        assert_eq!(x.rows(1, 3).unwrap().to_vec::<f32>().unwrap(), [3.0, 4.0, 5.0, 6.0]);
        let copy = x.duplicate().unwrap();
        x.fill_zero().unwrap();
        assert_eq!(copy.to_vec::<f32>().unwrap()[5], 6.0);
        x.copy_from(2, &copy.rows(0, 1).unwrap()).unwrap();
        assert_eq!(x.to_vec::<f32>().unwrap(), [0.0, 0.0, 0.0, 0.0, 1.0, 2.0]);
    }

    #[test]
    fn parts_are_written_alone_and_join_again() {
        let values: Vec<f32> = (0..10).map(|i| i as f32).collect();
        let whole = Tensor::from_slice(&Device::Cpu, &[10], &values).unwrap();
        let mut parts = whole.split(&[0..2, 3..7, 7..10]).unwrap();
        parts[1].fill_zero().unwrap();
        parts[2] = parts[2].reshape(&[3, 1]).unwrap();
        assert_eq!(parts[2].to_vec::<f32>().unwrap(), [7.0, 8.0, 9.0]);
        let mut inner = parts.remove(1).split(&[1..3, 3..3]).unwrap().remove(0);
        inner.write_bytes(bytemuck::cast_slice(&[50f32, 60.0])).unwrap();
        parts.push(inner);
        let view = parts[0].clone();
        assert!(Tensor::join(parts.clone()).is_err(), "a part has a view");
        drop(view);
        let last = parts.pop().unwrap();
        assert!(Tensor::join(parts.drain(1..).collect()).is_err(), "parts are elsewhere");
        let error = Tensor::join(vec![parts.remove(0), Tensor::zeros(&Device::Cpu, &[1], DType::F32).unwrap()]);
        assert!(error.is_err(), "of two memories");
        let whole = Tensor::join(vec![last]).unwrap();
        assert_eq!(whole.to_vec::<f32>().unwrap(), [0.0, 1.0, 2.0, 0.0, 50.0, 60.0, 0.0, 7.0, 8.0, 9.0]);
        for wrong in [[0..3, 2..4], [3..4, 0..1], [0..1, 8..11]] {
            assert!(whole.duplicate().unwrap().split(&wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn misfits_are_errors_with_both_sides() {
        let x = Tensor::zeros(&Device::Cpu, &[3, 2], DType::F32).unwrap();
        let message = x.expect("rmsnorm: weight", &[2]).unwrap_err().to_string();
        assert_eq!(message, "rmsnorm: weight has shape [3, 2], expected [2]");
        assert!(x.rows(2, 4).is_err() && x.reshape(&[7]).is_err() && x.to_vec::<i32>().is_err());
        assert!(Tensor::from_slice(&Device::Cpu, &[2], &[1i32]).is_err());
    }
}
