//! `ottava bench linear`.

use super::shared::{gradients, measure, share};
use crate::output::print_json;
use clap::Args;
use ottava_common::{Error, Result};
use ottava_recipe::RecipeName;
use ottava_recipe::storage::Gradients;
use ottava_settings::DeviceChoice;
use ottava_train::bench::{self, SweepCell};
use serde_json::json;

/// Time forward and backward of whole linear layers with their casts, relative to the same products without casts.
#[derive(Args)]
pub(super) struct Linear {
    /// A model that `bench train` knows, or a folder with a config.json.
    #[arg(long, default_value = "llama-2-7b")]
    model: String,
    /// The numbers of rows of the activations; by default 8192, and with --sweep 1024, 4096, 8192 and 32768.
    #[arg(long, value_delimiter = ',', value_parser = crate::commands::count)]
    tokens: Vec<usize>,
    /// Recipes to compare; speed-ups are relative to the first recipe. With --sweep, the first recipe other than bf16 is compared with
    /// bf16.
    #[arg(long, value_delimiter = ',', default_value = "bf16,fp8-delayed,fp8-current")]
    recipes: Vec<RecipeName>,
    /// The type in which gradients of weights are stored: float32, bfloat16 or float8.
    #[arg(long, default_value = "float32", value_parser = gradients)]
    gradient_dtype: Gradients,
    /// Time a grid of shapes instead of the shapes of a model, to see where FP8 is faster.
    #[arg(long)]
    sweep: bool,
    /// The numbers of inputs and outputs in the grid.
    #[arg(long, value_delimiter = ',', default_value = "512,1024,2048,4096,8192,16384", requires = "sweep", value_parser = crate::commands::count)]
    sizes: Vec<usize>,
    /// Where to run: auto, cuda or cpu.
    #[arg(long, default_value = "auto", value_parser = crate::device::parse)]
    device: DeviceChoice,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl Linear {
    pub(super) fn run(self) -> Result<()> {
        if self.sweep {
            return self.sweep();
        }
        let model = bench::model(&self.model)?;
        let (device, rates) = measure(self.device, self.json)?;
        let tokens = if self.tokens.is_empty() { vec![8192] } else { self.tokens };
        if !self.json {
            out!(
                "{:<22} {:<12} {:>20} {:>9} {:>12} {:>9} {:>11} {:>9}",
                "linear",
                "recipe",
                "T x N x K",
                "ms",
                "products ms",
                "ratio",
                "% of floor",
                "speed-up"
            );
        }
        let (mut rows, mut first) = (Vec::new(), None);
        let gradients = self.gradient_dtype;
        bench::linears(&device, &model, &tokens, &self.recipes, gradients, &rates, |row| {
            let [t, n, k] = row.sizes;
            if row.recipe == self.recipes[0] {
                first = Some(row.milliseconds);
            }
            if !self.json {
                out!(
                    "{:<22} {:<12} {:>20} {:>9.3} {:>12.3} {:>9.3} {:>11.0} {:>9.3}",
                    row.linear,
                    row.recipe.as_str(),
                    format!("{t} x {n} x {k}"),
                    row.milliseconds,
                    row.products_milliseconds,
                    row.milliseconds / row.products_milliseconds,
                    share(row.floor_milliseconds, row.milliseconds),
                    first.unwrap_or(row.milliseconds) / row.milliseconds
                );
            }
            rows.push(row);
        })?;
        if self.json {
            print_json(&json!({"device": device.to_string(), "model": self.model, "rates": rates, "rows": rows}));
        }
        Ok(())
    }

    fn sweep(self) -> Result<()> {
        let device = crate::device::open(self.device)?;
        let tokens = if self.tokens.is_empty() { vec![1024, 4096, 8192, 32_768] } else { self.tokens };
        let Some(&name) = self.recipes.iter().find(|&&name| name != RecipeName::Bf16) else {
            return Err(Error::Config("a sweep compares BF16 with another recipe; name one in --recipes".into()));
        };
        let mut cells: Vec<SweepCell> = Vec::new();
        bench::sweep(&device, &tokens, &self.sizes, name, self.gradient_dtype, |cell| {
            let ([t, n, k], ratio) = (cell.sizes, cell.milliseconds / cell.bf16_milliseconds);
            if !self.json {
                if n == self.sizes[0] && k == self.sizes[0] {
                    out!("{t} tokens: time of {} / time of bf16, by outputs (down) and inputs (across)", name.as_str());
                    let across: String = self.sizes.iter().map(|k| format!(" {k:>7}")).collect();
                    out!("{:>7}{across}", "");
                }
                let start = if k == self.sizes[0] { format!("{n:>7}") } else { String::new() };
                let end = if Some(&k) == self.sizes.last() { "\n" } else { "" };
                out_part!("{start} {ratio:>7.3}{end}");
            }
            cells.push(cell);
        })?;
        if self.json {
            print_json(&json!({"device": device.to_string(), "recipe": name, "cells": cells}));
        }
        Ok(())
    }
}
