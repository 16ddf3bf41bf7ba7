//! How the program speaks: results on standard output, everything else on standard error.

use indicatif::{ProgressBar, ProgressStyle};
use ottava_lm::trainer::StepReport;
use std::io::IsTerminal;

/// Log lines without clutter; `RUST_LOG` chooses more or less of them.
pub fn log_to_stderr() {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .without_time()
        .with_target(false)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
}

/// Prints `value` as one JSON object on one line.
pub fn print_json(value: &impl serde::Serialize) {
    println!("{}", serde_json::to_string(value).expect("results are written without fail"));
}

/// A bar on a terminal, plain lines elsewhere.
pub struct Progress {
    bar: Option<ProgressBar>,
    logging_steps: u64,
}

impl Progress {
    /// Speaks every `logging_steps` steps.
    pub fn new(logging_steps: u64) -> Progress {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{bar:30} {pos}/{len} [{elapsed}<{eta}] {msg}");
            ProgressBar::new(0).with_style(style.expect("the template is valid"))
        });
        Progress { bar, logging_steps }
    }

    /// Shows one step.
    pub fn step(&self, report: &StepReport) {
        let mut line = format!(
            "loss {:.4}  lr {:.2e}  grad norm {:.3}  {:.0} tokens/s",
            report.loss, report.learning_rate, report.grad_norm, report.tokens_per_second
        );
        if let Some(casts) = &report.casts {
            line += &format!("  fp8 saturated {:.1e} underflowed {:.1e}", casts.saturated, casts.underflowed);
        }
        match &self.bar {
            Some(bar) => {
                bar.set_length(report.max_steps);
                bar.set_position(report.step);
                bar.set_message(line);
            }
            None if report.step.is_multiple_of(self.logging_steps) || report.step == report.max_steps => {
                eprintln!("step {}/{}  {line}", report.step, report.max_steps);
            }
            None => {}
        }
        if let Some(evaluation) = report.evaluation {
            self.line(&format!(
                "step {}  validation loss {:.4}  perplexity {:.2}  bits per byte {:.4}",
                report.step, evaluation.loss, evaluation.perplexity, evaluation.bits_per_byte
            ));
        }
        if let Some(checkpoint) = &report.checkpoint {
            self.line(&format!("step {}  saved {}", report.step, checkpoint.display()));
        }
    }

    /// A line of its own, above the bar.
    pub fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None => eprintln!("{text}"),
        }
    }

    /// Leaves the bar as it is.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
        }
    }
}
