use super::*;
use crate::loader::tests::dataset;
use crate::packing::Packing;

/// Returns data sets of 40, 30 and 20 documents with these shares.
fn sets(shares: [u64; 3], layout: &RowLayout) -> Vec<DataSet> {
    let set = |(i, share): (usize, u64)| {
        let documents = 40 - 10 * i;
        let dataset = dataset(documents);
        let only = DataSet::only(dataset, Split::new(documents, 4.0).unwrap(), layout, 3).unwrap();
        DataSet { name: format!("set{i}"), share, ..only }
    };
    shares.into_iter().enumerate().map(set).collect()
}

const WRAPPED: RowLayout =
    RowLayout { seq_len: 16, packing: Packing::Wrapped, document_mask: false, max_documents: None };
const PACKED: RowLayout = RowLayout { seq_len: 16, packing: Packing::Bfd, document_mask: true, max_documents: None };

fn loader(sets: &[DataSet], layout: RowLayout, state: &DataState, shard: RowShare) -> BatchLoader {
    BatchLoader::new(sets, layout, state, shard).unwrap()
}

#[test]
fn shares_are_exact_to_the_token_over_a_thousand_steps() {
    // The shares are 0.7, 0.2 and 0.1 of 4 rows of 16 tokens in each of 1,000 steps.
    let sets = sets([700_000_000, 200_000_000, 100_000_000], &WRAPPED);
    let mut batches = loader(&sets, WRAPPED, &DataState::start(&sets, 3), RowShare::ALL);
    for step in 1..=1000_u64 {
        batches.next_batch(4).unwrap();
        let all = step * 64;
        for (i, tenths) in [7, 2, 1].into_iter().enumerate() {
            let apart = (10 * batches.tokens()[i]).abs_diff(tenths * all);
            assert!(apart < 160, "step {step}, set {i}: {:?}", batches.tokens());
        }
    }
    assert_eq!(batches.tokens(), [44_800, 12_800, 6_400]);
}

#[test]
fn shares_of_packed_rows_count_tokens_and_not_padding() {
    let sets = sets([3, 2, 1], &PACKED);
    let mut batches = loader(&sets, PACKED, &DataState::start(&sets, 3), RowShare::ALL);
    let mut tokens = 0;
    for step in 0..500 {
        let batch = batches.next_batch(2).unwrap();
        tokens += (batch.inputs.len() - batch.padding_tokens()) as u64;
        assert_eq!(batches.tokens().iter().sum::<u64>(), tokens, "step {step}");
        for (share, &of_set) in [3, 2, 1].into_iter().zip(batches.tokens()) {
            assert!((6 * of_set).abs_diff(share * tokens) <= 6 * 16, "step {step}: {:?}", batches.tokens());
        }
    }
}

#[test]
fn rows_of_a_set_are_those_that_it_has_alone() {
    let sets = sets([5, 3, 2], &WRAPPED);
    let mut mixed = loader(&sets, WRAPPED, &DataState::start(&sets, 3), RowShare::ALL);
    let mut alone: Vec<_> = sets
        .iter()
        .map(|set| loader(std::slice::from_ref(set), WRAPPED, &DataState::start(&sets[..1], 3), RowShare::ALL))
        .collect();
    for row in 0..200 {
        let before = mixed.tokens().to_vec();
        let batch = mixed.next_batch(1).unwrap();
        let set = (0..3).find(|&set| mixed.tokens()[set] > before[set]).unwrap();
        assert_eq!(batch, alone[set].next_batch(1).unwrap(), "row {row}, of set {set}");
    }
}

#[test]
fn resumed_mixtures_and_other_ranks_have_the_same_rows() {
    for layout in [WRAPPED, PACKED] {
        let sets = sets([7, 2, 1], &layout);
        let start = DataState::start(&sets, 3);
        let mut whole = loader(&sets, layout, &start, RowShare::ALL);
        let mut ranks: Vec<_> = [1, 2, 4]
            .map(|world| {
                (0..world).map(|rank| loader(&sets, layout, &start, RowShare { rank, world })).collect::<Vec<_>>()
            })
            .into();
        for step in 0..40 {
            let saved = serde_json::to_string(&whole.state()).unwrap();
            let mut resumed = loader(&sets, layout, &serde_json::from_str(&saved).unwrap(), RowShare::ALL);
            let expected = whole.next_batch(4).unwrap();
            assert_eq!(resumed.next_batch(4).unwrap(), expected, "step {step}");
            for ranks in &mut ranks {
                let world = ranks.len();
                for (rank, loader) in ranks.iter_mut().enumerate() {
                    let batch = loader.next_batch(4 / world).unwrap();
                    for row in 0..4 / world {
                        let at = (row * world + rank) * 16;
                        assert_eq!(batch.inputs[row * 16..][..16], expected.inputs[at..at + 16], "step {step}");
                        assert_eq!(batch.targets[row * 16..][..16], expected.targets[at..at + 16], "step {step}");
                    }
                    assert_eq!(loader.state(), whole.state(), "step {step}, rank {rank} of {world}");
                }
            }
        }
    }
}

#[test]
fn the_state_of_one_set_is_that_of_earlier_versions() {
    let sets = sets([1, 1, 1], &WRAPPED);
    let one = DataState::start(&sets[..1], 3);
    assert_eq!(serde_json::to_string(&one).unwrap(), r#"{"seed":3,"epoch":0,"document":0,"offset":0}"#);
    let error = BatchLoader::new(&sets, WRAPPED, &one, RowShare::ALL).err().unwrap().to_string();
    assert!(error.contains("a place in 1 data sets, and the run has 3"), "{error}");
    let mut state = loader(&sets, WRAPPED, &DataState::start(&sets, 3), RowShare::ALL);
    state.next_batch(7).unwrap();
    let mut state = state.state();
    state.restart_shares();
    assert!(
        matches!(&state, DataState::Mixture(sets) if sets.iter().all(|set| set.tokens == 0 && set.rows.document > 0))
    );
}

#[test]
fn an_epoch_reads_each_set_as_often_as_its_share_says() {
    let sets = sets([1, 1, 2], &WRAPPED);
    let tokens: Vec<f64> = sets.iter().map(|set| set.statistics.tokens as f64).collect();
    let data = TrainingData { epoch_tokens: tokens.iter().sum(), layout: WRAPPED, sets };
    assert_eq!(data.shares(), [0.25, 0.25, 0.5]);
    // The number of rows is a sum of three quotients in F64. At about ten rows, the rounding error is a few units of 2⁻⁵³.
    assert!((data.rows() - data.epoch_tokens / 16.0).abs() < 1e-9, "rows of a stream are full");
    let one = TrainingData { epoch_tokens: 2.0 * tokens[0], sets: data.sets[..1].to_vec(), layout: WRAPPED };
    assert_eq!(one.rows(), 2.0 * one.sets[0].statistics.rows);
    assert_eq!(one.key(), one.sets[0].dataset.meta().key);
    assert_ne!(data.key(), one.key());
}
