use crate::Tensor;
use crate::element::{Float, with_float};

pub(super) fn embedding(table: &Tensor, ids: &Tensor, y: &mut Tensor) {
    let channels = table.shape()[1];
    with_float!(table.dtype(), S => {
        let table: &[S] = table.host();
        for (y, &id) in y.host_mut::<S>().chunks_exact_mut(channels.max(1)).zip(ids.host::<i32>()) {
            y.copy_from_slice(&table[id as usize * channels..][..channels]);
        }
    });
}

pub(super) fn embedding_gradient(dy: &Tensor, ids: &Tensor, dtable: &mut Tensor) {
    let channels = dy.shape()[1];
    with_float!(dy.dtype(), S => {
        let dtable: &mut [<S as Float>::Real] = dtable.host_mut();
        for (dy, &id) in dy.host::<S>().chunks_exact(channels.max(1)).zip(ids.host::<i32>()) {
            for (sum, dy) in dtable[id as usize * channels..][..channels].iter_mut().zip(dy) {
                *sum += dy.load();
            }
        }
    });
}
