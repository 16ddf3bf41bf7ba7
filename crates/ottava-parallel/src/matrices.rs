//! Updates that transform whole matrices while ranks have slices of the matrices. Each matrix is gathered to one rank, transformed there, and sent
//! back as slices.
//!
//! With ZeRO stage 0, every rank has whole directions. Each rank transforms its share of the matrices and sends the results to all ranks. So replicas
//! have the same bits even if GPUs choose different algorithms for a product.

use ottava_common::error::Result;
use ottava_tensor::comm::Group;
use ottava_tensor::{DType, Device, Tensor};
use std::ops::Range;

/// A parameter whose update transforms matrices.
#[derive(Clone, Debug)]
pub(super) struct Divided {
    /// The shapes of the matrices, in their order in the parameter.
    pub(super) matrices: Vec<[usize; 2]>,
    /// The elements that each rank updates, by rank.
    pub(super) slices: Vec<Range<usize>>,
}

/// A matrix of a parameter, and the rank that transforms it.
#[derive(Clone, Debug, PartialEq)]
struct Matrix {
    /// The index of the parameter.
    param: usize,
    /// The elements of the flat parameter that belong to the matrix.
    elements: Range<usize>,
    shape: [usize; 2],
    owner: usize,
}

/// The matrices of some parameters, and the rank that transforms each matrix. The plan is the same on all ranks.
pub(super) struct MatrixPlan {
    params: Vec<Divided>,
    matrices: Vec<Matrix>,
    ranks: usize,
}

/// Returns a number proportional to the multiply-adds of a Newton-Schulz step.
fn cost([rows, columns]: [usize; 2]) -> u128 {
    let (short, long) = (rows.min(columns) as u128, rows.max(columns) as u128);
    short * short * (2 * long + short)
}

impl MatrixPlan {
    /// Assigns the matrices of `params` to `ranks`. The most expensive matrix is assigned first, each to the rank with the least work so far.
    pub(super) fn new(params: Vec<Divided>, ranks: usize) -> MatrixPlan {
        let mut matrices = Vec::new();
        for (param, divided) in params.iter().enumerate() {
            let mut end = 0;
            for &shape in &divided.matrices {
                let elements = end..end + shape[0] * shape[1];
                end = elements.end;
                matrices.push(Matrix { param, elements, shape, owner: 0 });
            }
        }
        let mut order: Vec<usize> = (0..matrices.len()).collect();
        order.sort_by_key(|&at| std::cmp::Reverse(cost(matrices[at].shape)));
        let mut work = vec![0; ranks];
        for at in order {
            let owner = (0..ranks).min_by_key(|&rank| work[rank]).expect("there is a rank");
            work[owner] += cost(matrices[at].shape);
            matrices[at].owner = owner;
        }
        MatrixPlan { params, matrices, ranks }
    }

    /// Returns the parts of the matrices of `owner` that `rank` updates: the index of the matrix, and elements of its parameter.
    fn pieces(&self, owner: usize, rank: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
        let owned = self.matrices.iter().enumerate().filter(move |(_, matrix)| matrix.owner == owner);
        let piece = move |(at, Matrix { param, elements, .. }): (usize, &Matrix)| {
            let slice = &self.params[*param].slices[rank];
            (at, elements.start.max(slice.start)..elements.end.min(slice.end))
        };
        owned.map(piece).filter(|(_, piece)| !piece.is_empty())
    }

    fn length(&self, owner: usize, rank: usize) -> usize {
        self.pieces(owner, rank).map(|(_, piece)| piece.len()).sum()
    }

    /// Replaces the flat `directions` of this rank's slices by the slices of the transformed matrices. All ranks of `group` call
    /// it. If `replicated`, each rank has the directions of whole parameters. `transform` gets the number of the matrix, counted over all parameters.
    pub(super) fn transform(
        &self,
        group: &Group,
        replicated: bool,
        device: &Device,
        directions: &mut [Option<Tensor>],
        mut transform: impl FnMut(usize, &Tensor) -> Result<Tensor>,
    ) -> Result<()> {
        let rank = group.rank();
        let mut whole = Vec::new();
        for matrix in &self.matrices {
            let elements = if matrix.owner == rank { matrix.elements.len() } else { 0 };
            whole.push(Tensor::empty(device, &[elements], DType::BF16)?);
        }
        let in_matrix = |at: usize, piece: &Range<usize>| piece.start - self.matrices[at].elements.start;
        let in_slice = |at: usize, piece: &Range<usize>| {
            let param = self.matrices[at].param;
            (param, piece.start - self.params[param].slices[rank].start)
        };
        // Send the directions to the owners.
        let pack = |owner: usize| {
            let pieces = self.pieces(owner, rank).map(|(at, piece)| {
                let (param, start) = in_slice(at, &piece);
                let direction = directions[param].as_ref().expect("a slice has a direction");
                Ok(direction.rows(start, start + piece.len())?)
            });
            joined(device, self.length(owner, rank), pieces)
        };
        let arrived = match replicated {
            true => vec![(rank, pack(rank)?)],
            false => self.exchange(group, "directions to owners", device, pack, |from| self.length(rank, from))?,
        };
        for (from, buffer) in arrived {
            let mut start = 0;
            for (at, piece) in self.pieces(rank, from) {
                let end = start + piece.len();
                whole[at].copy_from(in_matrix(at, &piece), &buffer.rows(start, end)?)?;
                start = end;
            }
        }
        let numbered = self.matrices.iter().zip(&mut whole).enumerate();
        for (number, (matrix, whole)) in numbered.filter(|(_, (matrix, _))| matrix.owner == rank) {
            let transformed = transform(number, &whole.reshape(&matrix.shape)?)?;
            *whole = transformed.reshape(&[matrix.elements.len()])?;
        }
        // Send the transformed directions back.
        let pack = |to: usize| {
            let part = |(at, piece): (usize, Range<usize>)| {
                let start = in_matrix(at, &piece);
                Ok(whole[at].rows(start, start + piece.len())?)
            };
            joined(device, self.length(rank, to), self.pieces(rank, to).map(part))
        };
        let arrived = self.exchange(group, "transformed directions", device, pack, |from| self.length(from, rank))?;
        drop(whole);
        for (from, buffer) in arrived {
            let mut start = 0;
            for (at, piece) in self.pieces(from, rank) {
                let (param, first) = in_slice(at, &piece);
                let end = start + piece.len();
                let direction = directions[param].as_mut().expect("a slice has a direction");
                direction.copy_from(first, &buffer.rows(start, end)?)?;
                start = end;
            }
        }
        Ok(())
    }

    /// Sends `pack(r)` to each rank `r`, and receives `expects(r)` elements from each rank `r`. In round `i`, each rank sends to the `i`-th rank
    /// after it and receives from the `i`-th rank before it, so no two ranks wait for each other.
    fn exchange(
        &self,
        group: &Group,
        name: &str,
        device: &Device,
        pack: impl Fn(usize) -> Result<Tensor>,
        expects: impl Fn(usize) -> usize,
    ) -> Result<Vec<(usize, Tensor)>> {
        let (rank, mut started) = (group.rank(), Vec::new());
        let mut arrived = vec![(rank, pack(rank)?)];
        for round in 1..self.ranks {
            let (to, from) = ((rank + round) % self.ranks, (rank + self.ranks - round) % self.ranks);
            let (sent, expected) = (pack(to)?, expects(from));
            let received = Tensor::empty(device, &[expected], sent.dtype())?;
            match (sent.is_empty(), expected) {
                (true, 0) => {}
                (true, _) => started.push((from, group.receive(name, from, received)?)),
                (false, 0) => drop(group.send(name, to, &sent)?.wait()?),
                (false, _) => started.push((from, group.exchange(name, to, &sent, from, received)?)),
            }
        }
        for (from, pending) in started {
            arrived.push((from, pending.wait()?));
        }
        Ok(arrived)
    }
}

/// Joins the `pieces`, which have `elements` elements in total.
fn joined(device: &Device, elements: usize, pieces: impl Iterator<Item = Result<Tensor>>) -> Result<Tensor> {
    let mut buffer = Tensor::empty(device, &[elements], DType::BF16)?;
    let mut start = 0;
    for piece in pieces {
        let piece = piece?;
        buffer.copy_from(start, &piece)?;
        start += piece.len();
    }
    Ok(buffer)
}

#[cfg(test)]
mod tests {
    use super::super::slices::Slices;
    use super::*;
    use ottava_tensor::comm::threads;
    use proptest::prelude::*;

    /// Returns the parameters of one bucket, with whole or divided directions.
    fn divided(shapes: &[Vec<[usize; 2]>], ranks: usize, replicated: bool) -> Vec<Divided> {
        let elements = |matrices: &Vec<[usize; 2]>| matrices.iter().map(|[rows, columns]| rows * columns).sum();
        let lengths: Vec<usize> = shapes.iter().map(elements).collect();
        let slices = Slices::new(lengths.clone(), ranks);
        let of = |(at, matrices): (usize, &Vec<[usize; 2]>)| Divided {
            matrices: matrices.clone(),
            slices: (0..ranks)
                .map(|rank| if replicated { 0..lengths[at] } else { slices.owned(rank).swap_remove(at) })
                .collect(),
        };
        shapes.iter().enumerate().map(of).collect()
    }

    fn shapes() -> impl Strategy<Value = Vec<Vec<[usize; 2]>>> {
        let matrix = (1..40usize, 1..60usize).prop_map(|(rows, columns)| [rows, columns]);
        proptest::collection::vec(proptest::collection::vec(matrix, 1..4), 1..9)
    }

    proptest! {
        #[test]
        fn each_element_goes_to_one_owner(shapes in shapes(), ranks in 1..9usize) {
            let plan = MatrixPlan::new(divided(&shapes, ranks, false), ranks);
            let mut seen: Vec<Vec<u8>> = plan.matrices.iter().map(|matrix| vec![0; matrix.elements.len()]).collect();
            for owner in 0..ranks {
                for rank in 0..ranks {
                    for (at, piece) in plan.pieces(owner, rank) {
                        let Matrix { elements, owner: its, .. } = &plan.matrices[at];
                        prop_assert_eq!(*its, owner);
                        piece.for_each(|element| seen[at][element - elements.start] += 1);
                    }
                }
            }
            prop_assert!(seen.iter().flatten().all(|&times| times == 1));
        }

        /// No rank has more work than its share plus the most expensive matrix.
        #[test]
        fn work_is_balanced(shapes in shapes(), ranks in 1..9usize) {
            let plan = MatrixPlan::new(divided(&shapes, ranks, false), ranks);
            let costs: Vec<_> = plan.matrices.iter().map(|matrix| cost(matrix.shape)).collect();
            let most = *costs.iter().max().expect("there are matrices");
            for rank in 0..ranks {
                let work: u128 = plan.matrices.iter().filter(|m| m.owner == rank).map(|m| cost(m.shape)).sum();
                prop_assert!(work <= costs.iter().sum::<u128>() / ranks as u128 + most);
            }
        }

        /// Each element is multiplied by a number that depends on the shape of the whole matrix.
        #[test]
        fn matrices_are_transformed_whole(shapes in shapes(), ranks in 1..5usize, replicated: bool) {
            let work = move |group: Group| {
                let params = divided(&shapes, ranks, replicated);
                let plan = MatrixPlan::new(params.clone(), ranks);
                let (cpu, rank) = (Device::Cpu, group.rank());
                let one = |length| Tensor::from_slice(&cpu, &[length], &vec![half::bf16::ONE; length]).unwrap();
                let slices: Vec<_> = params.iter().map(|param| param.slices[rank].clone()).collect();
                let mut directions: Vec<_> =
                    slices.iter().map(|slice| (!slice.is_empty()).then(|| one(slice.len()))).collect();
                plan.transform(&group, replicated, &cpu, &mut directions, |_, x| {
                    let [rows, columns] = x.dims("x")?;
                    assert!(x.to_vec::<half::bf16>()?.iter().all(|x| *x == half::bf16::ONE), "all elements arrived");
                    let value = half::bf16::from_f32((rows * 64 + columns) as f32 / 4096.0);
                    Ok(Tensor::from_slice(&cpu, &[rows, columns], &vec![value; rows * columns])?)
                })
                .unwrap();
                for ((param, slice), direction) in params.iter().zip(slices).zip(directions) {
                    let whole: Vec<_> = param
                        .matrices
                        .iter()
                        .flat_map(|[rows, columns]| {
                            vec![half::bf16::from_f32((rows * 64 + columns) as f32 / 4096.0); rows * columns]
                        })
                        .collect();
                    let got = direction.map_or(Vec::new(), |direction| direction.to_vec::<half::bf16>().unwrap());
                    assert_eq!(got, whole[slice]);
                }
                // The first rank ends last, because it forwards the messages.
                group.finish().unwrap();
            };
            let threads: Vec<_> = threads::group(ranks).into_iter().map(|group| {
                let work = work.clone();
                std::thread::spawn(move || work(group))
            }).collect();
            threads.into_iter().for_each(|thread| thread.join().expect("a rank has failed"));
        }
    }

    #[test]
    fn eight_blocks_of_llama_2_7b_balance_on_eight_ranks() {
        let block = [vec![[4096, 4096]; 3], vec![[4096, 4096]], vec![[11008, 4096]; 2], vec![[4096, 11008]]];
        let shapes: Vec<_> = (0..8).flat_map(|_| block.clone()).collect();
        let plan = MatrixPlan::new(divided(&shapes, 8, false), 8);
        let work = |rank: usize| plan.matrices.iter().filter(|m| m.owner == rank).map(|m| cost(m.shape)).sum::<u128>();
        let (least, most) = ((0..8).map(work).min().unwrap(), (0..8).map(work).max().unwrap());
        assert!(most as f64 / least as f64 <= 1.01, "{least} to {most}");
    }
}
