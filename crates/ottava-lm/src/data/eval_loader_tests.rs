use super::*;
use crate::data::loader::tests::dataset;
use crate::data::loader::validation_bytes;

#[test]
fn evaluation_predicts_every_validation_token_once() {
    let dataset = dataset(30);
    for val_set_size in [1.0, 7.0, 29.0] {
        let split = Split::new(30, val_set_size).unwrap();
        let documents = (0..split.validation_len()).map(|i| split.validation(i));
        let expected: Vec<i32> =
            documents.clone().flat_map(|i| dataset.document(i).unwrap()).map(|id| id as i32).collect();
        let bytes: u64 = documents.map(|i| u64::from(dataset.document_bytes(i))).sum();
        assert_eq!(validation_bytes(&dataset, &split), bytes);
        for (rows, world) in [(1, 1), (4, 1), (2, 3)] {
            let mut ranks: Vec<_> = (0..world)
                .map(|rank| {
                    EvalLoader::new(dataset.clone(), split, 16, rows, Shard { rank, world })
                        .map(Result::unwrap)
                        .collect::<Vec<_>>()
                })
                .collect();
            let batches = EvalLoader::new(dataset.clone(), split, 16, rows, Shard::WHOLE).batches().div_ceil(world);
            assert!(ranks.iter().all(|rank| rank.len() == batches), "ranks get the same number of batches");
            let (mut inputs, mut targets) = (Vec::new(), Vec::new());
            for row in 0..batches * rows * world {
                let rank = &mut ranks[row % world];
                let batch = &rank[row / world / rows];
                let at = row / world % rows * 16;
                inputs.extend_from_slice(&batch.inputs[at..at + 16]);
                targets.extend_from_slice(&batch.targets[at..at + 16]);
            }
            let (real, padding) = targets.split_at(expected.len());
            assert_eq!(real, expected);
            assert_eq!((inputs[0], &inputs[1..expected.len()]), (0, &expected[..expected.len() - 1]));
            assert!(padding.len() < rows * world * 16 && padding.iter().all(|&target| target == IGNORE_INDEX));
        }
    }
    let none = Split::new(30, 0.0).unwrap();
    assert_eq!(EvalLoader::new(dataset, none, 16, 4, Shard::WHOLE).count(), 0);
}
