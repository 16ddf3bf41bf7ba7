use super::{embedding, embedding_gradient, embedding_of_part, embedding_of_part_gradient};
use crate::testing::{Tolerance, integers, normals, parity, values};
use crate::{DType, Device, Tensor};

#[test]
fn embedding_agrees_across_devices() {
    for (v, c, t) in [(1, 1, 1), (5, 7, 40), (300, 257, 1000), (3, 264, 5000)] {
        for dtype in [DType::F32, DType::BF16] {
            let inputs = [
                normals("table", &[v, c], dtype),
                integers("ids", t, v),
                normals("dy", &[t, c], dtype),
                normals("sum", &[v, c], DType::F32),
            ];
            // Both devices sum in the order of the tokens.
            parity(&inputs, Tolerance::Exact, |x| {
                let mut sum = x[3].duplicate()?;
                embedding_gradient(&x[2], &x[1], &mut sum)?;
                Ok(vec![embedding(&x[0], &x[1])?, sum])
            });
        }
    }
}

#[test]
fn rows_are_gathered_and_gradients_scattered() {
    let table = Tensor::from_slice(&Device::Cpu, &[3, 2], &[0f64, 1.0, 10.0, 11.0, 20.0, 21.0]).unwrap();
    let ids = Tensor::from_slice(&Device::Cpu, &[3], &[2i32, 0, 2]).unwrap();
    let y = embedding(&table, &ids).unwrap();
    assert_eq!(values(&y), [20.0, 21.0, 0.0, 1.0, 20.0, 21.0]);
    let mut sum = Tensor::zeros(&Device::Cpu, &[3, 2], DType::F64).unwrap();
    embedding_gradient(&y, &ids, &mut sum).unwrap();
    assert_eq!(values(&sum), [0.0, 1.0, 0.0, 0.0, 40.0, 42.0]);
}

/// The parts of a table give the same embeddings and gradients as the whole table.
#[test]
fn parts_of_a_vocabulary_are_those_of_the_whole() {
    for (vocabulary, parts, channels, tokens) in [(6, 3, 8, 40), (300, 2, 257, 1000), (8, 4, 264, 3000)] {
        for dtype in [DType::F32, DType::BF16] {
            let inputs = [
                normals("table", &[vocabulary, channels], dtype),
                integers("ids", tokens, vocabulary),
                normals("dy", &[tokens, channels], dtype),
            ];
            parity(&inputs, Tolerance::Exact, |x| {
                let (whole, rows) = (embedding(&x[0], &x[1])?, vocabulary / parts);
                let mut gradient = Tensor::zeros(x[0].device(), &[vocabulary, channels], DType::F32)?;
                embedding_gradient(&x[2], &x[1], &mut gradient)?;
                let (mut sum, mut results) = (vec![0.0; tokens * channels], Vec::new());
                for first in (0..vocabulary).step_by(rows) {
                    let part = embedding_of_part(&x[0].rows(first, first + rows)?, &x[1], first)?;
                    sum.iter_mut().zip(values(&part)).for_each(|(sum, value)| *sum += value);
                    let mut of_part = Tensor::zeros(x[0].device(), &[rows, channels], DType::F32)?;
                    embedding_of_part_gradient(&x[2], &x[1], first, &mut of_part)?;
                    assert_eq!(values(&of_part), values(&gradient.rows(first, first + rows)?));
                    results.extend([part, of_part]);
                }
                assert_eq!(sum, values(&whole));
                Ok(results)
            });
        }
    }
}
