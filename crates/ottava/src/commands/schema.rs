//! `ottava schema`.

use super::pretty;
use clap::Args;
use ottava_common::Result;
use ottava_settings::schema;

/// Print the JSON schema of a run's TOML file, for editors.
#[derive(Args)]
#[command(
    after_help = "An editor that reads the schema (Taplo, Even Better TOML) explains keys and marks unknown ones. A file names it in its first
line, as those of `ottava init` do:
  #:schema run.schema.json

Examples:
  ottava schema > run.schema.json"
)]
pub struct Schema {}

impl Schema {
    pub fn run(self) -> Result<()> {
        out_part!("{}", pretty(&schema()));
        Ok(())
    }
}
