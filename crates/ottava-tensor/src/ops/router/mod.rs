//! Routers of mixtures of experts: the experts to which a token is sent, and the weights with which their outputs are added.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::real_type;
use crate::ops::dispatch::dispatch;
use crate::{DType, Device, Error, Result, Tensor};
use std::fmt;

/// How choices and weights are computed from logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// The number `K` of experts to which a token is sent.
    pub chosen: usize,
    /// The function from logits to scores.
    pub scores: RouterScores,
    /// If set, weights are divided by the sum of weights plus this value.
    pub normalise: Option<f64>,
    /// The factor of all weights.
    pub scale: f64,
    /// Groups of neighbouring experts. A token chooses experts only from its best groups.
    pub groups: Option<ExpertGroups>,
}

/// The function from logits to scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterScores {
    /// The softmax over all experts.
    Softmax,
    /// The sigmoid of the logit of each expert.
    Sigmoid,
}

/// Groups of neighbouring experts. A token is only sent to experts of its best groups. DeepSeek-AI 2024, arXiv:2405.04434, section 2.2.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// The number of groups. They have equal numbers of experts.
    pub count: usize,
    /// The number of groups from which a token chooses experts.
    pub chosen: usize,
    /// The score of a group.
    pub by: GroupScore,
}

/// The score of a group of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupScore {
    /// The score of the group's best expert.
    Best,
    /// The sum of the scores of the group's two best experts.
    TwoBest,
}

/// The choices of a router.
#[derive(Clone, Debug)]
pub struct Routes {
    /// The experts of each token, I32 `[T, K]`, the best first. Among equal experts, the first is preferred.
    pub ids: Tensor,
    /// The weights of these experts, `[T, K]`, F32 (F64 for F64).
    pub weights: Tensor,
    /// The logarithm of the sum of the exponentials of the logits, `[T]`.
    pub lse: Tensor,
    /// The entropy in nats of the scores divided by their sum, `[T]`. It is 0 for tokens that do not count.
    pub entropy: Tensor,
}

/// The losses of a router, which are added to the loss of the model. Both losses are means over the `N` tokens of a micro-batch that count. Padding
/// does not count.
#[derive(Clone, Copy, Debug)]
pub struct RouterLosses<'a> {
    /// The factor `c` of the balance loss, `c · E / (K · N²) · Σ_e counts[e] · Σ_t p[t, e]`. `p` are the scores of a token divided by
    /// their sum. Fedus et al. 2021, arXiv:2101.03961, equation 4, over `K` choices.
    pub balance: f64,
    /// The numbers of tokens that count and chose each expert, I32 `[R, E]`, on each of the `R` ranks that divide the micro-batch.
    pub counts: &'a Tensor,
    /// The factor of the mean of `lse²`. Zoph et al. 2022, arXiv:2202.08906, equation 5.
    pub z: f64,
    /// I32 `[T]`: `N` for a token that counts, 0 for a token that does not count.
    pub counted: &'a Tensor,
    /// The factor of both losses in the value that is differentiated, F32 `[1]` (F64 for F64).
    pub scale: &'a Tensor,
}

/// The maximum number of experts, and the maximum number of groups.
const MOST_EXPERTS: usize = 1024;
const MOST_GROUPS: usize = 64;

impl fmt::Display for Routing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.scores {
            RouterScores::Softmax => "the softmax of logits",
            RouterScores::Sigmoid => "the sigmoid of logits",
        })?;
        if let Some(ExpertGroups { count, chosen, by }) = self.groups {
            let by = if by == GroupScore::Best { "best expert" } else { "two best experts" };
            write!(f, ", in the {chosen} of {count} groups with the {by}")?;
        }
        if self.normalise.is_some() {
            f.write_str(", weights divided by their sum")?;
        }
        if self.scale != 1.0 {
            write!(f, ", times {}", self.scale)?;
        }
        Ok(())
    }
}

impl Routing {
    /// Returns the problem of this routing over `experts`, if any.
    pub fn problem(&self, experts: usize) -> Option<String> {
        let Routing { chosen, groups, .. } = *self;
        if chosen == 0 || chosen > experts || experts > MOST_EXPERTS {
            return Some(format!(
                "{chosen} of {experts} experts; there are 1 to {MOST_EXPERTS}, of which at least 1 is chosen"
            ));
        }
        let groups = groups?;
        let size = experts / groups.count.max(1);
        let least = if groups.by == GroupScore::TwoBest { 2 } else { 1 };
        if groups.count == 0 || groups.count > MOST_GROUPS || size * groups.count != experts || size < least {
            return Some(format!("{experts} experts do not divide into {} groups of at least {least}", groups.count));
        }
        if groups.chosen > groups.count || groups.chosen * size < chosen {
            return Some(format!("{} groups of {size} experts, of which {chosen} are chosen", groups.chosen));
        }
        None
    }

    /// Returns whether experts are compared by their logits, which have the order of scores. If not, they are compared by the sum of score and bias.
    fn compares_logits(&self, bias: Option<&Tensor>) -> bool {
        bias.is_none() && self.groups.is_none_or(|groups| groups.by == GroupScore::Best)
    }

    fn check(&self, what: &str, logits: &Tensor) -> Result<[usize; 2]> {
        let [tokens, experts] = logits.dims(what)?;
        logits.expect_dtype(what, &[DType::F32, DType::F64])?;
        match self.problem(experts) {
            Some(problem) => Err(Error::Value(format!("{what}: {problem}"))),
            None => Ok([tokens, experts]),
        }
    }
}

/// Routes tokens by their `logits` `[T, E]`, F32 (F64 on the CPU).
///
/// Scores are the softmax or sigmoid of the logits. The `K` experts with the largest scores are chosen, only from the best groups if there are
/// groups. With `bias` `[E]`, experts are compared by the sum of score and bias. Among equal experts, lower ids are chosen first.
///
/// The weight of an expert is its score (without bias) times [`Routing::scale`]. If [`Routing::normalise`] is set, the score is divided by the sum of
/// the chosen experts' scores. `counted` I32 `[T]` is 0 for tokens that do not count; if it is `None`, all tokens count.
///
/// Errors with [`Error::Value`] if the routing does not fit the number of experts.
pub fn route(logits: &Tensor, bias: Option<&Tensor>, routing: Routing, counted: Option<&Tensor>) -> Result<Routes> {
    let [tokens, experts] = routing.check("route: logits", logits)?;
    let (device, real) = (logits.device(), logits.dtype());
    if let Some(counted) = counted {
        expect_counted("route: counted", counted, tokens, device)?;
    }
    if let Some(bias) = bias {
        bias.expect("route: bias", &[experts])?;
        bias.expect_dtype("route: bias", &[real])?;
        bias.expect_device("route: bias", device)?;
    }
    let empty = |shape: &[usize], dtype| Tensor::empty(device, shape, dtype);
    let mut routes = Routes {
        ids: empty(&[tokens, routing.chosen], DType::I32)?,
        weights: empty(&[tokens, routing.chosen], real)?,
        lse: empty(&[tokens], real)?,
        entropy: empty(&[tokens], real)?,
    };
    dispatch! { device,
        cpu => cpu::route(logits, bias, routing, counted, &mut routes),
        gpu => cuda::route(gpu, logits, bias, routing, counted, &mut routes)?,
    }
    Ok(routes)
}

fn expect_counted(what: &str, counted: &Tensor, tokens: usize, device: &Device) -> Result<()> {
    counted.expect(what, &[tokens])?;
    counted.expect_dtype(what, &[DType::I32])?;
    counted.expect_device(what, device)
}

/// Returns how often the tokens that count chose each of `experts` experts, I32 `[E]`, from `ids` I32 `[T, K]` of [`Routes`]. `counted` I32 `[T]` is
/// 0 for tokens that do not count.
pub fn count_choices(ids: &Tensor, counted: &Tensor, experts: usize) -> Result<Tensor> {
    let [tokens, _] = ids.dims("count_choices: ids")?;
    ids.expect_dtype("count_choices: ids", &[DType::I32])?;
    expect_counted("count_choices: counted", counted, tokens, ids.device())?;
    if experts > MOST_EXPERTS {
        return Err(Error::Value(format!("count_choices: {experts} experts; the kernel has room for {MOST_EXPERTS}")));
    }
    let mut counts = Tensor::zeros(ids.device(), &[experts], DType::I32)?;
    dispatch! { ids.device(),
        cpu => cpu::count_choices(ids, counted, &mut counts),
        gpu => cuda::count_choices(gpu, ids, counted, &mut counts)?,
    }
    Ok(counts)
}

/// Returns the gradient of [`route`] by the logits, with their shape and type. It is computed from the gradient by the weights, `dweights` `[T, K]`,
/// and includes the gradients of the `losses`. The bias has no gradient.
pub fn route_backward(
    logits: &Tensor,
    routes: &Routes,
    dweights: &Tensor,
    routing: Routing,
    losses: Option<RouterLosses>,
) -> Result<Tensor> {
    let [tokens, experts] = routing.check("route_backward: logits", logits)?;
    let (device, real) = (logits.device(), logits.dtype());
    for (what, tensor, dtype) in
        [("route_backward: ids", &routes.ids, DType::I32), ("route_backward: dweights", dweights, real)]
    {
        tensor.expect(what, &[tokens, routing.chosen])?;
        tensor.expect_dtype(what, &[dtype])?;
        tensor.expect_device(what, device)?;
    }
    routes.lse.expect("route_backward: lse", &[tokens])?;
    if let Some(losses) = &losses {
        let [ranks, _] = losses.counts.dims("route_backward: counts")?;
        losses.counts.expect("route_backward: counts", &[ranks, experts])?;
        expect_counted("route_backward: counted", losses.counted, tokens, device)?;
        losses.counts.expect_dtype("route_backward: counts", &[DType::I32])?;
        losses.scale.expect("route_backward: scale", &[1])?;
        losses.scale.expect_dtype("route_backward: scale", &[real_type(real)])?;
    }
    let mut dlogits = logits.empty_like()?;
    dispatch! { device,
        cpu => cpu::route_backward(logits, routes, dweights, routing, losses, &mut dlogits),
        gpu => cuda::route_backward(gpu, logits, routes, dweights, routing, losses, &mut dlogits)?,
    }
    Ok(dlogits)
}

/// Computes `counts[e] += now[e]`, for I64 `counts` `[E]` and I32 `now` `[E]`.
pub fn add_counts(counts: &mut Tensor, now: &Tensor) -> Result<()> {
    now.expect_dtype("add_counts: now", &[DType::I32])?;
    counts.expect_dtype("add_counts: counts", &[DType::I64])?;
    counts.expect("add_counts: counts", now.shape())?;
    counts.expect_device("add_counts: counts", now.device())?;
    dispatch! { counts.device().clone(),
        cpu => cpu::add_counts(counts, now),
        gpu => cuda::add_counts(&gpu, counts, now)?,
    }
    Ok(())
}
