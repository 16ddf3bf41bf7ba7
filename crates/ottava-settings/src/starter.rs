//! Generates the configuration file of a first run from a model and data.

use crate::load::Resolve;
use crate::pairs::{Names, Pairs};
use crate::steps::{Batches, Counted};
use crate::{RunConfig, WeightInit};
use ottava_checkpoint::ModelFiles;
use ottava_common::error::{Error, Result};
use ottava_data::source::first_record;
use ottava_data::{ChatTemplate, Clock, Formatting, Guess, SplitUse, Tokenizer, expand, toml_table};
use ottava_recipe::RecipeName;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// The name of the schema file, which is in the same folder as the run's file.
pub const SCHEMA: &str = "run.schema.json";

/// The sizes of batches, unless the model has fewer positions or the data are small.
const BATCHES: Batches = Batches { max_length: 2048, rows: 4, micro_batches: 4 };

/// The maximum size in bytes of data whose documents are counted. Larger data give enough steps in batches of any size.
const COUNTED: u64 = 8 << 20;

/// The learning rate of adapters.
const RATE_OF_ADAPTERS: &str = "2e-4";

/// The generated file of a first run.
pub struct Starter {
    /// The text of the file.
    pub toml: String,
    /// Facts about the model and the data, one sentence each.
    pub found: Vec<String>,
}

/// Settings of a first run that its user chooses.
pub struct StarterOptions {
    /// The recipe.
    pub recipe: RecipeName,
    /// Whether the run trains adapters and not all weights.
    pub lora: bool,
}

/// Generates the file of a first run of `model` (a folder or a `config.json`) with the data `files`. `resolve` replaces names of remote models and data
/// by local paths, which are read; the file has the names.
///
/// Errors with [`Error::Model`] if the model cannot be read, with [`Error::Data`] if a file cannot be read, and with [`Error::Config`] for adapters of
/// a model without weights.
pub fn starter(model: &Path, files: &[PathBuf], options: &StarterOptions, resolve: &mut Resolve) -> Result<Starter> {
    let mut config = RunConfig::default();
    config.model.path = model.to_path_buf();
    config.data.train_files = files.to_vec();
    resolve(&mut config)?;
    let folder = config.model.path.clone();
    let records = Records::read(&mut config)?;
    let sizes = config.decoder_config()?;
    config.model.init =
        if folder.is_dir() && ModelFiles::open(&folder).is_ok() { WeightInit::Pretrained } else { WeightInit::Random };
    let chats = records.files.iter().any(|(_, formatting)| formatting.has_prompts());
    let talks = records.files.iter().any(|(_, formatting)| *formatting == Formatting::Messages);
    let name = model.file_name().unwrap_or_default().to_string_lossy();
    let name = name.strip_suffix(".json").unwrap_or(&name).to_string();
    config.output_dir = Path::new("runs").join(&name);
    let pretrained = config.model.init == WeightInit::Pretrained;
    if options.lora && !pretrained {
        return Err(Error::Config(format!(
            "{}: adapters need the weights of a model, and there are none; leave out --lora, or name a folder with weights",
            model.display()
        )));
    }
    let weights = if pretrained { "pretrained weights" } else { "random weights, since there are no others" };
    let mut found = vec![format!("{}: {weights}, {} positions", model.display(), sizes.context())];
    found.extend(records.found.iter().cloned());
    let missing = missing(&config, talks);
    let epochs = if chats { 3.0 } else { 1.0 };
    let sizing = match missing.is_empty() && records.is_known {
        true => Sizing::of_data(&mut config, sizes.context(), epochs),
        false => Sizing::of_large_data(sizes.context()),
    };
    found.extend(missing);
    found.extend(sizing.found.iter().cloned());
    let toml = text(model, files, options, &config, &records, &sizing, epochs);
    match toml::from_str::<RunConfig>(&toml).map(|config| config.problems()) {
        Ok(problems) if problems.is_empty() => Ok(Starter { toml, found }),
        Ok(problems) => Err(Error::Config(problems.join("\n"))),
        Err(error) => Err(Error::Config(error.to_string())),
    }
}

/// Returns the text of the file.
fn text(
    model: &Path,
    files: &[PathBuf],
    options: &StarterOptions,
    config: &RunConfig,
    records: &Records,
    sizing: &Sizing,
    epochs: f64,
) -> String {
    let pretrained = config.model.init == WeightInit::Pretrained;
    let quoted = |path: &Path| toml::Value::String(path.display().to_string()).to_string();
    let rate = match (pretrained, options.lora) {
        (true, true) => RATE_OF_ADAPTERS,
        (true, false) => "2e-5",
        (false, _) => "3e-4",
    };
    let lora = match options.lora {
        true => "# Adapters instead of all weights: less memory.\n[lora]\nr = 16\nlora_alpha = 32.0\n".to_string(),
        false => format!(
            "# Adapters instead of all weights: less memory. They take a larger rate: also set `learning_rate = {RATE_OF_ADAPTERS}` above.\n\
             # [lora]\n# r = 16\n# lora_alpha = 32.0\n"
        ),
    };
    let mut names: Vec<_> = records.files.iter().map(|(_, formatting)| formatting.as_str()).collect();
    names.dedup();
    let Sizing { batches: Batches { max_length, rows, micro_batches }, validation, why, .. } = sizing;
    let mut toml = String::new();
    write!(
        toml,
        "#:schema {SCHEMA}\n# Settings that are not here have their defaults; `ottava config reference` shows and explains all.\n\
         output_dir = {}\n\n\
         [model]\npath = {}\ninit = \"{}\"\n{}\n\
         [data]\ntrain_files = [{}]\n# Fields of the records: {}.\n\
         max_length = {max_length}\n{validation}\n{}\n\
         [training]\nnum_train_epochs = {epochs:.1}\n# Sequences per forward and backward, and how many of these make a step.{why}\n\
         per_device_train_batch_size = {rows}\ngradient_accumulation_steps = {micro_batches}\n\n\
         [optimizer]\nlearning_rate = {rate}\nweight_decay = 0.0\n\n\
         [lr_scheduler]\n# A share of the run's steps.\nwarmup_steps = 0.03\n\n\
         [evaluation]\neval_steps = 100\n\n\
         [precision]\n# \"bf16\", or an FP8 recipe: \"fp8-current\", \"fp8-delayed\", \"fp8-row\" or \"fp8-block\". `ottava plan` says what each linear gains.\nrecipe = \"{}\"\n\n\
         [memory]\n# The cheapest recomputation that fits the device.\nrecompute = \"auto\"\n\n\
         {lora}",
        quoted(&config.output_dir),
        quoted(model),
        if pretrained { "pretrained" } else { "random" },
        if config.model.path.is_dir() { "" } else { "# A tokenizer.json or a folder with one.\ntokenizer = \"\"\n" },
        files.iter().map(|file| quoted(file)).collect::<Vec<_>>().join(", "),
        names.join(", "),
        records.lines,
        options.recipe.as_str(),
    )
    .expect("a text takes any length");
    toml
}

/// The files of the data, and how their records are read.
struct Records {
    /// Each file with the formatting of its records.
    files: Vec<(PathBuf, Formatting)>,
    /// The table `[data.records]` of the file; empty if records have fields that Ottava knows.
    lines: String,
    /// Facts about the files, one sentence each.
    found: Vec<String>,
    /// Whether the records can be read.
    is_known: bool,
}

impl Records {
    /// Reads the first records of the files of `config`. If their fields have other names than Ottava's, guesses which fields they are, and sets the guess.
    ///
    /// Errors if a file cannot be read.
    fn read(config: &mut RunConfig) -> Result<Records> {
        let before = config.clone();
        let unknown = match config.resolve_data() {
            Ok(files) => return Ok(Records::known(files, String::new())),
            Err(error) => error,
        };
        let Some(record) = unknown_record(&before) else { return Err(unknown) };
        if let Some(guess) = Guess::of_record(&record) {
            *config = before.clone();
            config.data.records.fields = Pairs(guess.fields.clone());
            let role = |(ours, theirs): &(String, String)| (ours.clone(), Names::One(theirs.clone()));
            config.data.records.roles = Pairs(guess.roles.iter().map(role).collect());
            if let Ok(files) = config.resolve_data() {
                let mut lines =
                    "\n[data.records]\n# A guess from the names of the fields: Ottava's names with the names in the files.\n".to_string();
                let tables = [("fields", &guess.fields), ("roles", &guess.roles)];
                for (key, pairs) in tables.into_iter().filter(|(_, pairs)| !pairs.is_empty()) {
                    lines += &format!("{key} = {}\n", toml_table(pairs));
                }
                let mut records = Records::known(files, lines);
                let told = "the records have other names of fields; the file has a guess under [data.records], which \
                            `ottava plan --show-data` shows";
                records.found.push(told.into());
                return Ok(records);
            }
        }
        *config = before;
        // A name with a line break would end the comment.
        let fields: Vec<_> = record.keys().take(8).map(|name| format!("`{}`", name.escape_debug())).collect();
        let lines = format!(
            "\n# The records have the fields {}. Name the field with the text, or the fields with the prompt and its answer:\n\
             # [data.records]\n# fields = {{ text = \"FIELD\" }}\n# fields = {{ prompt = \"FIELD\", completion = \"FIELD\" }}\n",
            fields.join(", ")
        );
        let paths = expand(&config.data.train_files, SplitUse::Training)?;
        let files: Vec<_> = paths.into_iter().map(|path| (path, Formatting::Text)).collect();
        let found = vec![format!("before you train, set the lines at [data.records] in the file: {unknown}")];
        Ok(Records { files, lines, found, is_known: false })
    }

    fn known(files: Vec<(PathBuf, Formatting)>, lines: String) -> Records {
        let told = |(file, formatting): &(PathBuf, Formatting)| {
            // Files of the cache have long paths.
            let name = file.file_name().unwrap_or_default().display();
            format!("{name}: records of formatting `{}`", formatting.as_str())
        };
        let found = files.iter().map(told).collect();
        Records { files, lines, found, is_known: true }
    }
}

/// Returns the first record of the first file whose records are not usable by their fields.
fn unknown_record(config: &RunConfig) -> Option<serde_json::Map<String, serde_json::Value>> {
    let files = expand(&config.data.train_files, SplitUse::Training).ok()?;
    let is_unknown = |file: &PathBuf| {
        let mut alone = config.clone();
        alone.data.train_files = vec![file.clone()];
        alone.resolve_data().is_err()
    };
    first_record(files.iter().find(|file| is_unknown(file))?).ok()?
}

/// The sizes of batches, and the documents of validation.
struct Sizing {
    batches: Batches,
    /// The line with `val_set_size`.
    validation: &'static str,
    /// The reason for batches that are smaller than [`BATCHES`], as a comment.
    why: String,
    /// Facts about the data, one sentence each.
    found: Vec<String>,
}

impl Sizing {
    /// Returns the sizes for a model with `positions`, and data that give enough steps.
    fn of_large_data(positions: usize) -> Sizing {
        let batches = Batches { max_length: BATCHES.max_length.min(positions), ..BATCHES };
        Sizing { batches, validation: "val_set_size = 0.01", why: String::new(), found: Vec::new() }
    }

    /// Counts the documents of `config`, if the files are small, and returns sizes that give enough steps in `epochs` epochs. Data that cannot be read
    /// are a fact that is found.
    fn of_data(config: &mut RunConfig, positions: usize, epochs: f64) -> Sizing {
        let large = Sizing::of_large_data(positions);
        config.data.max_length = large.batches.max_length;
        match count(config) {
            Ok(Some(counted)) => large.for_counted(&counted, epochs),
            Ok(None) => large,
            Err(error) => Sizing { found: vec![format!("before you train: {error}")], ..large },
        }
    }

    fn for_counted(self, counted: &Counted, epochs: f64) -> Sizing {
        let batches = self.batches.for_data(counted, epochs);
        let Counted { documents, tokens, .. } = counted;
        let found = vec![format!("{documents} document{}, {tokens} tokens", if *documents == 1 { "" } else { "s" })];
        let why = match batches == self.batches {
            true => String::new(),
            false => format!(
                "\n# Smaller than usual, with rows of {} tokens, because the data have only {tokens} tokens: so {epochs} epochs have more steps.",
                batches.max_length
            ),
        };
        let validation = match documents {
            1 => "# The only document is trained on, so none is left for validation.\nval_set_size = 0",
            _ => self.validation,
        };
        Sizing { batches, validation, why, found }
    }
}

/// Counts the documents of `config`; `None` if its files are large. The tokens are stored where `ottava train` reads them.
fn count(config: &RunConfig) -> Result<Option<Counted>> {
    let files = expand(&config.data.train_files, SplitUse::Training)?;
    let bytes: u64 = files.iter().filter_map(|path| std::fs::metadata(path).ok()).map(|found| found.len()).sum();
    if bytes > COUNTED {
        return Ok(None);
    }
    let mut config = config.clone();
    // The number of documents is not known yet, and a single document cannot be divided.
    config.data.val_set_size = 0.0;
    let data = config.prepare_data(&Tokenizer::load(config.tokenizer_path())?)?;
    Counted::of(&data).map(Some)
}

/// Returns a sentence for each file of texts that the run needs and its model does not have. `talks` says whether the data are conversations.
fn missing(config: &RunConfig, talks: bool) -> Vec<String> {
    let path = config.model.tokenizer_path();
    let (shown, folder) = (path.display(), path.is_dir());
    let mut missing = Vec::new();
    if !folder || !path.join("tokenizer.json").is_file() {
        let what =
            if folder { format!("{shown}: there is no tokenizer.json") } else { "the model has no folder".into() };
        missing.push(format!(
            "{what}; before you train, set `model.tokenizer` to a tokenizer.json or to a folder with one"
        ));
    }
    if talks && folder && !matches!(ChatTemplate::load(path, None, Clock::Fixed), Ok(Some(_))) {
        missing.push(format!(
            "{shown}: there is no chat template, which the conversations need; before you train, set `tokenizer.chat_template`, for example to \"chatml\""
        ));
    }
    missing
}
