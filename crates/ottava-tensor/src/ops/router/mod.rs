//! Routers of mixtures of experts: which experts a token is sent to, and by which weights their outputs are added.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::real_type;
use crate::ops::dispatch::dispatch;
use crate::{DType, Device, Error, Result, Tensor};
use std::fmt;

/// How logits become choices and weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// Experts that a token is sent to, `K`.
    pub chosen: usize,
    /// What logits become.
    pub scores: RouterScores,
    /// Whether weights are divided by their sum plus this value; `None` if they are not.
    pub normalise: Option<f64>,
    /// The factor of all weights.
    pub scale: f64,
    /// Groups of neighbouring experts; experts are chosen from some of the groups.
    pub groups: Option<ExpertGroups>,
}

/// The function from logits to scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterScores {
    /// Over all experts.
    Softmax,
    /// The sigmoid of the logit of each expert alone.
    Sigmoid,
}

/// Groups of neighbouring experts: a token is only sent to experts of its best groups. DeepSeek-AI 2024, arXiv:2405.04434, section 2.2.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// The number of groups, each of as many experts.
    pub count: usize,
    /// Groups that a token chooses from.
    pub chosen: usize,
    /// The score of a group.
    pub by: GroupScore,
}

/// The score of a group of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupScore {
    /// The score of its best expert.
    Best,
    /// The sum of the scores of its two best experts.
    TwoBest,
}

/// The choices of a router.
#[derive(Clone, Debug)]
pub struct Routes {
    /// I32 `[T, K]`: the experts of each token, the best first; of equal ones the first.
    pub ids: Tensor,
    /// `[T, K]`, F32 (F64 for F64): their weights.
    pub weights: Tensor,
    /// `[T]`: the logarithm of the sum of the exponentials of the logits.
    pub lse: Tensor,
    /// `[T]`: the entropy of the scores, divided by their sum, in nats; 0 for tokens that do not count.
    pub entropy: Tensor,
}

/// Losses of a router beside the loss of the model. Both are means over the `N` tokens of a micro-batch that count; padding does not.
#[derive(Clone, Copy, Debug)]
pub struct RouterLosses<'a> {
    /// The factor `c` of the loss of balance, `c · E / (K · N²) · Σ_e counts[e] · Σ_t p[t, e]`, with the scores `p` of a token divided by
    /// their sum. Fedus et al. 2021, arXiv:2101.03961, equation 4, over `K` choices.
    pub balance: f64,
    /// I32 `[R, E]`: how many tokens that count chose each expert, on each of the `R` ranks that divide the micro-batch.
    pub counts: &'a Tensor,
    /// The factor of the mean of `lse²`. Zoph et al. 2022, arXiv:2202.08906, equation 5.
    pub z: f64,
    /// I32 `[T]`: `N` for a token that counts, 0 for one that does not.
    pub counted: &'a Tensor,
    /// F32 `[1]` (F64 for F64): the factor of both losses in what is differentiated.
    pub scale: &'a Tensor,
}

/// Most experts, and most groups of them.
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
    /// Problems of this routing over `experts`.
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

    /// Whether experts are compared by their logits, which order like scores; else by the sum of score and bias.
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
/// Scores are the softmax or sigmoid of the logits. The `K` experts with the largest scores are chosen, with `bias` `[E]` by the sum of score and
/// bias, in the best groups if there are any. The weight of an expert is its score (without bias), divided by the sum over the chosen ones if
/// [`Routing::normalise`] is set, times [`Routing::scale`]. Among equal ones, lower ids are chosen first. `counted` I32 `[T]` is 0 for tokens
/// that do not count; if it is `None`, all tokens count.
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

/// I32 `[E]`: how often the tokens that count chose each of `experts` experts, from I32 `ids` `[T, K]` of [`Routes`]. `counted` I32 `[T]` is 0 for
/// tokens that do not count.
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

/// The gradient by the logits of [`route`], like them, from the gradient by its weights, `dweights` `[T, K]`, plus the gradients of the `losses`. The bias has
/// none.
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

/// `counts[e] += now[e]`, for I64 `counts` `[E]` and I32 `now` `[E]`.
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
