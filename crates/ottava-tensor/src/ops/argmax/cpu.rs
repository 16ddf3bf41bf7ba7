use crate::Tensor;

pub(super) fn argmax(x: &Tensor, at: &mut Tensor) {
    let columns = x.shape()[1].max(1);
    for (row, at) in x.host::<f32>().chunks_exact(columns).zip(at.host_mut::<i32>()) {
        *at = of_row(row);
    }
}

fn of_row(row: &[f32]) -> i32 {
    // The maxima of eight interleaved parts are independent, so compilers vectorise them.
    let (mut largest, mut finite) = ([f32::NEG_INFINITY; 8], true);
    let (eights, rest) = row.as_chunks::<8>();
    for eight in eights {
        for (largest, &x) in largest.iter_mut().zip(eight) {
            *largest = if x > *largest { x } else { *largest };
            finite &= x.abs() < f32::INFINITY;
        }
    }
    finite &= rest.iter().all(|x| x.is_finite());
    let largest = largest.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max);
    match row.iter().position(|&x| x == largest) {
        Some(at) if finite => at as i32,
        _ => -1,
    }
}
