//! Recommends linears to compute in BF16: the linears whose casts cost the most loss per FLOP that FP8 speeds up.

use ottava_recipe::LinearSite;
use std::fmt::Write;

/// A linear of a recommendation.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Recommended {
    /// The name of the linear.
    pub linear: String,
    /// The estimated cost of the casts of its forward in the loss, in nats per token.
    pub loss_cost: f64,
    /// Its share of the FLOPs of forward of all linears that are cast.
    pub flops: f64,
}

/// The linears whose forward should be computed in BF16.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Recommendation {
    /// The linears, in the order in which they were chosen.
    pub linears: Vec<Recommended>,
    /// The sum of the costs of all linears that are cast, in nats per token.
    pub all_costs: f64,
    /// The number of linears that are cast.
    pub all_linears: usize,
}

impl Recommendation {
    /// Chooses linears with these `costs`, with the sizes of `sites`, until the sum of their costs is `share` of all costs. Linears with the largest
    /// cost per FLOP come first.
    pub fn of(costs: &[(String, f64)], sites: &[LinearSite], share: f64) -> Recommendation {
        let size = |name: &str| {
            let site = sites.iter().find(|site| site.name == name)?;
            Some((site.inputs * site.outputs * site.experts.map_or(1, |experts| experts.chosen)) as f64)
        };
        let mut known: Vec<_> = costs.iter().filter_map(|(name, cost)| Some((name, *cost, size(name)?))).collect();
        known.sort_by(|a, b| (b.1 / b.2).total_cmp(&(a.1 / a.2)));
        let all_costs: f64 = known.iter().map(|(_, cost, _)| cost).sum();
        let all_flops: f64 = known.iter().map(|(_, _, flops)| flops).sum();
        let (mut linears, mut removed) = (Vec::new(), 0.0);
        for (name, loss_cost, flops) in &known {
            if removed >= share * all_costs {
                break;
            }
            removed += loss_cost;
            linears.push(Recommended { linear: (*name).clone(), loss_cost: *loss_cost, flops: flops / all_flops });
        }
        Recommendation { linears, all_costs, all_linears: known.len() }
    }

    /// Returns the sum of the costs of the chosen linears.
    pub fn removed(&self) -> f64 {
        self.linears.iter().map(|one| one.loss_cost).sum()
    }

    /// Returns the share of the FLOPs of forward that are computed in BF16.
    pub fn flops(&self) -> f64 {
        self.linears.iter().map(|one| one.flops).sum()
    }

    /// Returns the table `[[precision.overrides]]` that computes the forward of these linears in BF16.
    pub fn to_toml(&self) -> String {
        let mut text = format!(
            "# The forward of {} of {} linears in BF16: {:.1} % of the FLOPs of forward. An estimated {:.5} of {:.5} nats per token that the\n\
             # casts of forward cost are avoided. The first table that names a linear counts.\n[[precision.overrides]]\nlayers = [\n",
            self.linears.len(),
            self.all_linears,
            100.0 * self.flops(),
            self.removed(),
            self.all_costs
        );
        for Recommended { linear, loss_cost, .. } in &self.linears {
            writeln!(text, "    \"{linear}\", # {loss_cost:.1e} nats").expect("writing to a string does not fail");
        }
        text + "]\nhigh_precision_products = [\"fprop\"]\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tolerance of sums of up to four decimals below 1 in F64, whose errors are some units of 2⁻⁵³.
    const ROUNDING: f64 = 1e-12;

    fn site(name: &str, outputs: usize) -> LinearSite {
        LinearSite {
            name: name.into(),
            parts: vec![],
            outputs,
            inputs: 10,
            block: None,
            after_swiglu: false,
            divides_inputs: false,
            experts: None,
        }
    }

    #[test]
    fn linears_with_the_largest_cost_per_flop_are_chosen_until_their_share_is_reached() {
        let costs = [("large", 0.004), ("small", 0.003), ("calm", 0.001), ("other", 0.0)];
        let costs: Vec<_> = costs.map(|(name, cost)| (name.to_string(), cost)).to_vec();
        let sites = [site("calm", 10), site("large", 80), site("small", 5), site("other", 5)];
        let chosen = |share| {
            let all = Recommendation::of(&costs, &sites, share);
            assert!((all.all_costs - 0.008).abs() < ROUNDING && all.all_linears == 4);
            (all.linears.iter().map(|one| one.linear.clone()).collect::<Vec<_>>().join(" "), all)
        };
        assert_eq!(chosen(0.0).0, "");
        assert_eq!(chosen(0.3).0, "small");
        assert_eq!(chosen(0.5).0, "small calm");
        let (names, all) = chosen(0.9);
        assert_eq!(names, "small calm large");
        assert!((all.flops() - 0.95).abs() < ROUNDING && (all.removed() - 0.008).abs() < ROUNDING);
        let table: toml::Table = toml::from_str(&all.to_toml()).unwrap();
        let first = &table["precision"]["overrides"][0];
        assert_eq!(first["layers"][2].as_str(), Some("large"));
        assert_eq!(first["high_precision_products"][0].as_str(), Some("fprop"));
    }
}
