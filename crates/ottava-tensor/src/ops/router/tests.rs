use super::*;
use crate::testing::{Tolerance, normals, parity, values};

/// The tolerance of scores of four experts in F64, below 3. They differ by a few units of 2⁻⁵³; up to 6e-16 was seen.
const ROUNDING: f64 = 1e-14;

const PLAIN: Routing = Routing { chosen: 2, scores: RouterScores::Softmax, normalise: None, scale: 1.0, groups: None };

/// The routing of DeepSeek-V3, with 2 of 4 groups.
const SIGMOID: Routing = Routing {
    chosen: 3,
    scores: RouterScores::Sigmoid,
    normalise: Some(1e-20),
    scale: 2.5,
    groups: Some(ExpertGroups { count: 4, chosen: 2, by: GroupScore::TwoBest }),
};

/// The routing of DeepSeek-V2, with 2 of 4 groups.
const GROUPED: Routing =
    Routing { scale: 16.0, groups: Some(ExpertGroups { count: 4, chosen: 2, by: GroupScore::Best }), ..PLAIN };

const NORMALISED: Routing = Routing { chosen: 4, normalise: Some(0.0), ..PLAIN };

fn logits(values: &[f64]) -> Tensor {
    Tensor::from_slice(&Device::Cpu, &[1, values.len()], values).unwrap()
}

fn routed(values: &[f64], bias: Option<&[f64]>, routing: Routing) -> (Vec<i32>, Vec<f64>) {
    let bias = bias.map(|bias| Tensor::from_slice(&Device::Cpu, &[bias.len()], bias).unwrap());
    let routes = route(&logits(values), bias.as_ref(), routing, None).unwrap();
    (routes.ids.to_vec().unwrap(), routes.weights.to_vec().unwrap())
}

#[test]
fn of_equal_logits_the_first_experts_are_chosen() {
    let all = Routing { chosen: 3, ..PLAIN };
    assert_eq!(routed(&[1.0; 5], None, all).0, [0, 1, 2]);
    assert_eq!(routed(&[0.0, 2.0, 1.0, 2.0, 1.0], None, all).0, [1, 3, 2]);
    // If the softmax of logits underflows, the logits still have an order.
    assert_eq!(routed(&[-900.0, -800.0, 0.0], None, all).0, [2, 1, 0]);
}

#[test]
fn weights_are_scores_of_the_chosen() {
    let z = [1.0, 3.0, 2.0, -1.0];
    let exp = z.map(f64::exp);
    let sum: f64 = exp.iter().sum();
    let close = |got: &[f64], expected: [f64; 2]| got.iter().zip(expected).all(|(a, b)| (a - b).abs() < ROUNDING);
    let (ids, weights) = routed(&z, None, PLAIN);
    assert!(ids == [1, 2] && close(&weights, [exp[1] / sum, exp[2] / sum]), "{weights:?}");
    let (_, weights) = routed(&z, None, Routing { normalise: Some(0.0), scale: 3.0, ..PLAIN });
    let of_chosen = exp[1] + exp[2];
    assert!(close(&weights, [3.0 * exp[1] / of_chosen, 3.0 * exp[2] / of_chosen]), "{weights:?}");
    let routes = route(&logits(&z), None, PLAIN, None).unwrap();
    let entropy: f64 = exp.iter().map(|e| e / sum).map(|p| -p * p.ln()).sum();
    assert!((values(&routes.lse)[0] - sum.ln()).abs() < ROUNDING);
    assert!((values(&routes.entropy)[0] - entropy).abs() < ROUNDING);
}

#[test]
fn a_bias_chooses_and_does_not_weigh() {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let routing = Routing { scores: RouterScores::Sigmoid, ..PLAIN };
    let (ids, weights) = routed(&[2.0, 1.0, 0.0, -1.0], Some(&[0.0, 0.0, 0.0, 1.0]), routing);
    assert_eq!(ids, [3, 0]);
    assert!(
        (weights[0] - sigmoid(-1.0)).abs() < ROUNDING && (weights[1] - sigmoid(2.0)).abs() < ROUNDING,
        "{weights:?}"
    );
}

#[test]
fn only_the_best_groups_are_chosen_from() {
    // With the best expert as score, the best groups are 1 and 3. With the two best experts, they are 0 and 1.
    let z = [2.0, 2.1, 3.0, 0.0, 0.5, 0.4, 2.9, -4.0];
    let best = Routing { chosen: 4, ..GROUPED };
    assert_eq!(routed(&z, None, best).0, [2, 6, 3, 7]);
    let two_best = Routing { chosen: 4, groups: SIGMOID.groups, ..SIGMOID };
    assert_eq!(routed(&z, None, two_best).0, [2, 1, 0, 3]);
}

/// Returns `Σ dweights · weights + losses`, whose gradient by the logits is tested. The losses are means over the tokens that are `counted`.
fn objective(
    logits: &Tensor,
    dweights: &[f64],
    routing: Routing,
    counted: &[i32],
    [balance, z]: [f64; 2],
    scale: f64,
) -> f64 {
    let routes = route(logits, None, routing, None).unwrap();
    let weighed: f64 = values(&routes.weights).iter().zip(dweights).map(|(a, b)| a * b).sum();
    let [_, experts] = logits.dims::<2>("logits").unwrap();
    let counts = counts_of(&routes, counted, experts);
    let tokens = counted.iter().filter(|&&counted| counted != 0).count() as f64;
    let x = values(logits);
    let mut balanced = 0.0;
    for (row, _) in x.chunks(experts).zip(counted).filter(|(_, counted)| **counted != 0) {
        let scores: Vec<f64> = match routing.scores {
            RouterScores::Softmax => row.iter().map(|z| z.exp()).collect(),
            RouterScores::Sigmoid => row.iter().map(|z| 1.0 / (1.0 + (-z).exp())).collect(),
        };
        let sum: f64 = scores.iter().sum();
        balanced += scores.iter().zip(&counts).map(|(s, &n)| s / sum * f64::from(n)).sum::<f64>();
    }
    let all = values(&routes.lse);
    let of_lse: f64 = all.iter().zip(counted).filter(|(_, counted)| **counted != 0).map(|(lse, _)| lse * lse).sum();
    let balanced = balance * experts as f64 / routing.chosen as f64 * balanced / tokens;
    weighed + scale / tokens * (balanced + z * of_lse)
}

fn counts_of(routes: &Routes, counted: &[i32], experts: usize) -> Vec<i32> {
    let mut counts = vec![0; experts];
    let ids = routes.ids.to_vec::<i32>().unwrap();
    for (ids, _) in ids.chunks(ids.len() / counted.len()).zip(counted).filter(|(_, counted)| **counted != 0) {
        ids.iter().for_each(|&id| counts[id as usize] += 1);
    }
    counts
}

#[test]
fn route_backward_is_the_gradient() {
    let (tokens, experts) = (5, 8);
    let x = normals("logits", &[tokens, experts], DType::F64);
    for routing in [PLAIN, NORMALISED, GROUPED, SIGMOID, Routing { chosen: 8, ..NORMALISED }] {
        let dweights = normals("dweights", &[tokens, routing.chosen], DType::F64);
        for (losses, counted) in [([0.0; 2], [5; 5]), ([0.3, 0.0], [5; 5]), ([0.2, 0.1], [3, 3, 0, 3, 0])] {
            let tensor = |shape: &[usize], values: &[i32]| Tensor::from_slice(&Device::Cpu, shape, values).unwrap();
            let scale = Tensor::from_slice(&Device::Cpu, &[1], &[0.7]).unwrap();
            let on_device = tensor(&[tokens], &counted);
            let routes = route(&x, None, routing, Some(&on_device)).unwrap();
            // The counts of two ranks: the first rank has one choice of each expert, and the second has the rest.
            let counts = counts_of(&routes, &counted, experts);
            assert_eq!(count_choices(&routes.ids, &on_device, experts).unwrap().to_vec::<i32>().unwrap(), counts);
            let of_ranks = [vec![1; experts], counts.iter().map(|n| n - 1).collect()].concat();
            let counts = tensor(&[2, experts], &of_ranks);
            let [balance, z] = losses;
            let with = RouterLosses { balance, counts: &counts, z, counted: &on_device, scale: &scale };
            let with = (losses != [0.0; 2]).then_some(with);
            let got = values(&route_backward(&x, &routes, &dweights, routing, with).unwrap());
            let (at, dweights) = (values(&x), values(&dweights));
            for i in 0..at.len() {
                let moved = |by: f64| {
                    let mut at = at.clone();
                    at[i] += by;
                    let at = Tensor::from_slice(&Device::Cpu, &[tokens, experts], &at).unwrap();
                    objective(&at, &dweights, routing, &counted, losses, 0.7)
                };
                let expected = (moved(1e-6) - moved(-1e-6)) / 2e-6;
                // The differences have two errors: 2e-13 times the third derivative, and 6e-11 times the objective from rounding it by 2⁻⁵³ (divided
                // by 2e-6). Up to 1.6e-9 was seen.
                assert!((got[i] - expected).abs() < 1e-7, "{routing:?} {losses:?} {i}: {} and {expected}", got[i]);
            }
        }
    }
}

#[test]
fn routers_agree_across_devices() {
    for (tokens, experts, routing) in [
        (1, 2, PLAIN),
        (37, 33, PLAIN),
        (129, 128, Routing { chosen: 8, ..NORMALISED }),
        (9, 60, NORMALISED),
        (65, 256, Routing { groups: Some(ExpertGroups { count: 8, chosen: 4, by: GroupScore::Best }), ..GROUPED }),
        (5, 1, Routing { chosen: 1, scores: RouterScores::Sigmoid, ..PLAIN }),
    ] {
        let mut x = normals("logits", &[tokens, experts], DType::F32).to_vec::<f32>().unwrap();
        // Logits have ties, and each device must choose the first expert.
        x.iter_mut().for_each(|x| *x = (*x * 8.0).round() / 8.0);
        let inputs = [
            Tensor::from_slice(&Device::Cpu, &[tokens, experts], &x).unwrap(),
            normals("dweights", &[tokens, routing.chosen], DType::F32),
            Tensor::from_slice(&Device::Cpu, &[1], &[0.5f32]).unwrap(),
            // Every fifth token is padding.
            Tensor::from_slice(
                &Device::Cpu,
                &[tokens],
                &(0..tokens).map(|t| if t % 5 == 4 { 0 } else { 30 }).collect::<Vec<i32>>(),
            )
            .unwrap(),
        ];
        parity(&inputs, Tolerance::Exact, |t| {
            let ids = route(&t[0], None, routing, None)?.ids;
            Ok(vec![count_choices(&ids, &t[3], experts)?, ids])
        });
        // Exponentials differ in the last bits, and sums run in another order.
        parity(&inputs, Tolerance::Steps(DType::F32, 64.0), |t| {
            let routes = route(&t[0], None, routing, Some(&t[3]))?;
            let counts = count_choices(&routes.ids, &t[3], experts)?.reshape(&[1, experts])?;
            let losses = RouterLosses { balance: 0.1, counts: &counts, z: 0.01, counted: &t[3], scale: &t[2] };
            Ok(vec![
                route_backward(&t[0], &routes, &t[1], routing, None)?,
                route_backward(&t[0], &routes, &t[1], routing, Some(losses))?,
                routes.weights,
                routes.lse,
                routes.entropy,
            ])
        });
    }
}

/// Scores differ by so much that roundings do not change the choice.
#[test]
fn biased_choices_agree_across_devices() {
    let (tokens, experts) = (33, 16);
    let x: Vec<f32> = (0..tokens * experts).map(|i| ((i * 7919) % 61) as f32 / 16.0 - 2.0).collect();
    let inputs =
        [Tensor::from_slice(&Device::Cpu, &[tokens, experts], &x).unwrap(), normals("bias", &[experts], DType::F32)];
    parity(&inputs, Tolerance::Exact, |t| Ok(vec![route(&t[0], Some(&t[1]), SIGMOID, None)?.ids]));
}

#[test]
fn counts_are_added() {
    let inputs = [Tensor::from_slice(&Device::Cpu, &[3], &[5, 1, 3]).unwrap()];
    let add = |t: &[Tensor]| {
        let mut counts = Tensor::zeros(t[0].device(), &[3], DType::I64)?;
        add_counts(&mut counts, &t[0])?;
        add_counts(&mut counts, &t[0])?;
        Ok(vec![counts])
    };
    parity(&inputs, Tolerance::Exact, add);
    assert_eq!(add(&inputs).unwrap()[0].to_vec::<i64>().unwrap(), [10, 2, 6]);
}

#[test]
fn misfits_are_errors() {
    let problem = |experts, routing: Routing| routing.problem(experts).unwrap_or_default();
    assert_eq!(problem(8, PLAIN), "");
    assert_eq!(problem(1, PLAIN), "2 of 1 experts; there are 1 to 1024, of which at least 1 is chosen");
    assert_eq!(problem(10, GROUPED), "10 experts do not divide into 4 groups of at least 1");
    assert_eq!(problem(8, Routing { chosen: 5, ..GROUPED }), "2 groups of 2 experts, of which 5 are chosen");
    let error = route(&normals("x", &[2, 1], DType::F32), None, PLAIN, None).unwrap_err().to_string();
    assert!(error.starts_with("route: logits: 2 of 1 experts"), "{error}");
}
