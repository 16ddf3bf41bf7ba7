//! Code that the tests of ranks of a mesh share: a run on one rank, and the distance between two runs.

use crate::setup::{Seeded, batch};
use ottava_data::Batch;
use ottava_models::{Decoder, DecoderConfig, Span};
use ottava_parallel::optim::{AdamWConfig, AdamWOptimizer, AdjustLr, MuonOptimizer, Optimizer};
use ottava_parallel::{LayerAxes, Partition, Ranks, ReduceFormat, Schedule, SentActivations, Zero, divide};
use ottava_recipe::Recipe;
use ottava_recipe::layer_ranks::LayerRanks;
use ottava_recipe::param::{MemoryPolicy, Purpose, WeightSource};
use ottava_tensor::Device;
use ottava_tensor::comm::{Group, MeshShape};
use ottava_tensor::ops::IGNORE_INDEX;
use ottava_train::step::TrainStep;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

const ADAMW: AdamWConfig =
    AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, max_grad_norm: 1.0 };

/// A run on ranks of a mesh.
#[derive(Clone)]
pub struct Mesh {
    pub sizes: DecoderConfig,
    pub recipe: Recipe,
    pub memory: MemoryPolicy,
    pub schedule: Schedule,
    pub context: usize,
    /// The number of ranks of data x context that have different experts.
    pub expert: usize,
    pub tensor: usize,
    pub data: usize,
    pub zero: Zero,
    /// The number of ranks that divide slices; 0 means all ranks of data x context.
    pub shard: usize,
    /// How ranks send activations.
    pub sent: SentActivations,
    /// Whether ranks with slices of weights gather values although products read codes.
    pub gathers_values: bool,
    /// The numbers of rows and of tokens per row of a micro-batch.
    pub rows: [usize; 2],
    /// Whether Muon updates the matrices of the blocks.
    pub muon: bool,
}

/// The run of one rank.
pub struct MeshRank {
    pub ranks: Rc<Ranks>,
    pub model: Decoder,
    pub optimizer: Box<dyn Optimizer>,
    pub work: TrainStep,
}

impl Mesh {
    /// Returns the run of one rank with one micro-batch of `rows`, and defaults for all else.
    pub fn of_one_rank(sizes: DecoderConfig, recipe: Recipe, rows: [usize; 2]) -> Mesh {
        Mesh {
            sizes,
            recipe,
            memory: MemoryPolicy::FULL,
            schedule: Schedule::of_one_rank(1),
            context: 1,
            expert: 1,
            tensor: 1,
            data: 1,
            zero: Zero::Nothing,
            shard: 0,
            sent: SentActivations::Auto,
            gathers_values: false,
            rows,
            muon: false,
        }
    }

    /// Returns the number of all ranks.
    pub fn ranks(&self) -> usize {
        self.tensor * self.context * self.schedule.ranks * self.data
    }

    /// Returns the ranks of the mesh; `comm` is one of them.
    pub fn join(&self, comm: Group) -> Rc<Ranks> {
        let Mesh { context, expert, tensor, data, schedule, .. } = *self;
        let shape = MeshShape { context, expert, tensor, pipeline: schedule.ranks, ..MeshShape::of_data(data) };
        let ranks = Ranks::new(comm, shape, &Device::Cpu).unwrap().sending(self.sent);
        Rc::new(ranks.with_shard_groups(self.shard).unwrap())
    }

    /// Returns the layers of the stages of a rank of the pipeline.
    pub fn spans(&self, rank: usize) -> Vec<Span> {
        let costs = Decoder::describe(&self.sizes, &self.recipe).unwrap().layer_costs(self.rows[1], false);
        let all = divide(&costs, self.schedule.all_stages()).unwrap();
        (0..self.schedule.stages).map(|stage| all[self.schedule.number(rank, stage)].clone()).collect()
    }

    /// Makes the run of one of `ranks`, with seeded weights.
    pub fn run(&self, ranks: &Rc<Ranks>) -> MeshRank {
        let axis = Rc::new(LayerAxes::new(ranks.clone()));
        self.build(ranks, &self.spans(ranks.pipeline().rank()), axis, &mut Seeded { std: 0.1 })
    }

    /// Makes the run of one of `ranks` with these stages, this exchange of activations, and these weights. The weights are not cast yet.
    pub fn build(
        &self,
        ranks: &Rc<Ranks>,
        spans: &[Span],
        axis: Rc<dyn LayerRanks>,
        weights: &mut dyn WeightSource,
    ) -> MeshRank {
        let (purpose, [rows, tokens]) = (Purpose::Train(self.memory), self.rows);
        let mut model = Decoder::staged(&self.sizes, &self.recipe, &Device::Cpu, purpose, 64, spans, axis).unwrap();
        let partition =
            Partition::new(&mut model, ranks.clone(), self.zero, ReduceFormat::Stored, self.gathers_values).unwrap();
        partition.load(&mut model, weights).unwrap();
        let params = model.parameters();
        let optimizer: Box<dyn Optimizer> = match self.muon {
            true => Box::new(MuonOptimizer::new(0.95, AdjustLr::MatchRmsAdamw, ADAMW, &params).unwrap()),
            false => Box::new(AdamWOptimizer::new(ADAMW, &params).unwrap()),
        };
        let mut work = TrainStep::shared(&model, self.schedule, rows, tokens, partition).unwrap();
        let drops = self.sizes.lora.as_ref().is_some_and(|lora| lora.dropout > 0.0);
        if self.sizes.embedding.noise > 0.0 || drops {
            work = work.with_draws(3).unwrap();
        }
        MeshRank { ranks: ranks.clone(), model, optimizer, work }
    }
}

impl MeshRank {
    /// Loads the micro-batches of a step that this rank reads. `row` returns a micro-batch by its number among all ranks.
    pub fn load(&mut self, row: impl Fn(usize) -> Batch) {
        let (rank, ranks) = self.ranks.rows();
        for micro_batch in 0..self.work.schedule().micro_batches {
            self.work.load(micro_batch, &row(micro_batch * ranks + rank)).unwrap();
        }
    }
}

/// Returns a batch of these rows and tokens. `ignored` tokens have no target.
pub fn rows(name: &str, [rows, tokens]: [usize; 2], ignored: Range<usize>, sizes: &DecoderConfig) -> Batch {
    let [inputs, mut targets] = batch(name, rows, tokens, sizes.vocabulary).map(|ids| ids.to_vec::<i32>().unwrap());
    targets[ignored].fill(IGNORE_INDEX);
    Batch::whole(inputs, targets, rows)
}

/// The final state of ranks, by name.
pub type Seen = BTreeMap<String, Vec<f64>>;

/// Returns the largest distance of a tensor, relative to its norm, and its name.
pub fn distance(expected: &Seen, got: &Seen) -> (f64, String) {
    let names = |seen: &Seen| seen.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(expected), names(got));
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    let of = |(name, a): (&String, &Vec<f64>)| {
        let apart = norm(&mut a.iter().zip(&got[name]).map(|(a, b)| a - b));
        (apart / norm(&mut a.iter().copied()).max(1e-30), name.clone())
    };
    expected.iter().map(of).max_by(|a, b| a.0.total_cmp(&b.0)).expect("a model has tensors")
}
