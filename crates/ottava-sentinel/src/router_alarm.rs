//! Alarms about routers that send almost all tokens to the same experts.

use ottava_recipe::scaling::RouterLoad;
use std::fmt::{self, Display};

/// The number of choices per expert below which the share of an expert is not significant.
const LEAST: i64 = 8;

/// A router that has collapsed.
#[derive(Clone, Debug, PartialEq)]
pub struct CollapsedRouter {
    /// The name of the router.
    pub name: String,
    /// The number of experts that a token is sent to.
    pub chosen: usize,
    /// The number of experts of the router.
    pub experts: usize,
    /// The share of the choices of a step that the `chosen` most used experts have.
    pub share: f64,
}

impl CollapsedRouter {
    /// Returns the routers whose `chosen` most used experts have a larger share of the choices of a step than `bound`. A collapsed router has a share
    /// of 1: it sends each token to the same experts. Routers that choose all experts or have few tokens are never returned.
    pub fn among(loads: &[RouterLoad], bound: f64) -> Vec<CollapsedRouter> {
        let of_router = |load: &RouterLoad| {
            let (experts, all) = (load.counts.len(), load.counts.iter().sum::<i64>());
            if load.chosen >= experts || all < LEAST * experts as i64 {
                return None;
            }
            let mut counts = load.counts.clone();
            counts.sort_unstable_by(|a, b| b.cmp(a));
            let share = counts[..load.chosen].iter().sum::<i64>() as f64 / all as f64;
            (share > bound).then(|| CollapsedRouter { name: load.name.clone(), chosen: load.chosen, experts, share })
        };
        loads.iter().filter_map(of_router).collect()
    }
}

impl Display for CollapsedRouter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CollapsedRouter { name, chosen, experts, share } = self;
        write!(
            f,
            "the router `{name}` has collapsed: {chosen} of {experts} experts get {:.1} % of its choices",
            100.0 * share
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(name: &str, chosen: usize, counts: &[i64]) -> RouterLoad {
        RouterLoad { name: name.into(), chosen, counts: counts.to_vec(), rows: 0, entropy: 0.0 }
    }

    #[test]
    fn routers_that_send_all_tokens_to_the_same_experts_are_named() {
        let loads = [
            load("balanced", 2, &[26, 24, 25, 25]),
            load("collapsed", 2, &[3, 95, 2, 100]),
            load("all", 4, &[50, 50, 50, 50]),
            load("few", 1, &[7, 0, 0, 0]),
            load("one", 1, &[0, 0, 64, 0]),
        ];
        let found = CollapsedRouter::among(&loads, 0.9);
        let names: Vec<_> = found.iter().map(|router| router.name.as_str()).collect();
        assert_eq!(names, ["collapsed", "one"]);
        assert_eq!(
            found[0].to_string(),
            "the router `collapsed` has collapsed: 2 of 4 experts get 97.5 % of its choices"
        );
        assert!(CollapsedRouter::among(&loads, 1.0).is_empty());
    }
}
