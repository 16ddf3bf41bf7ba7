use crate::Tensor;
use crate::element::{Float, with_float};

/// Returns the row of a token in a table of `rows` rows. If the table is a part of a vocabulary, it begins with token `first`, and tokens outside the
/// part have no row.
fn row_of(id: i32, first: Option<usize>, rows: usize) -> Option<usize> {
    let Some(first) = first else { return Some(id as usize) };
    (id as usize).checked_sub(first).filter(|row| *row < rows)
}

pub(super) fn embedding(table: &Tensor, ids: &Tensor, first: Option<usize>, y: &mut Tensor) {
    let (rows, channels) = (table.shape()[0], table.shape()[1]);
    with_float!(table.dtype(), S => {
        let table: &[S] = table.host();
        for (y, &id) in y.host_mut::<S>().chunks_exact_mut(channels.max(1)).zip(ids.host::<i32>()) {
            match row_of(id, first, rows) {
                Some(row) => y.copy_from_slice(&table[row * channels..][..channels]),
                None => y.fill(S::store(<S as Float>::Real::default())),
            }
        }
    });
}

pub(super) fn embedding_gradient(dy: &Tensor, ids: &Tensor, first: Option<usize>, dtable: &mut Tensor) {
    let (rows, channels) = (dtable.shape()[0], dy.shape()[1]);
    with_float!(dy.dtype(), S => {
        let dtable: &mut [<S as Float>::Real] = dtable.host_mut();
        for (dy, &id) in dy.host::<S>().chunks_exact(channels.max(1)).zip(ids.host::<i32>()) {
            let Some(row) = row_of(id, first, rows) else { continue };
            for (sum, dy) in dtable[row * channels..][..channels].iter_mut().zip(dy) {
                *sum += dy.load();
            }
        }
    });
}
