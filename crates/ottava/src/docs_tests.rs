//! Tests that the commands and settings in documents exist in this program.

use crate::Cli;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser};
use ottava_settings::RunConfig;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace is there")
}

/// Returns the path of each document, relative to the root, with its text.
fn documents() -> Vec<(String, String)> {
    let folders = ["", "docs", "configs"].map(|folder| root().join(folder));
    let entries = folders.iter().flat_map(|folder| std::fs::read_dir(folder).unwrap());
    let paths = entries.map(|entry| entry.unwrap().path());
    let mut found: Vec<PathBuf> = paths
        .filter(|path| path.extension().is_some_and(|end| end == "md" || end == "toml"))
        // The changelog names commands by the names that they had at the time.
        .filter(|path| !["CHANGELOG.md", "Cargo.toml"].iter().any(|name| path.ends_with(name)))
        .collect();
    found.sort();
    let read = |path: PathBuf| {
        let text = std::fs::read_to_string(&path).unwrap();
        (path.strip_prefix(root()).unwrap().display().to_string(), text)
    };
    found.into_iter().map(read).collect()
}

/// Returns the fenced blocks of a document whose language is among `languages`.
fn blocks<'a>(text: &'a str, languages: &[&str]) -> Vec<&'a str> {
    let mut parts = text.split("```");
    let mut found = Vec::new();
    while let (Some(_), Some(block)) = (parts.next(), parts.next()) {
        if let Some((language, block)) = block.split_once('\n')
            && languages.contains(&language.trim())
        {
            found.push(block);
        }
    }
    found
}

/// Splits a line of a shell into words, without a comment at its end. Operators such as `|` are words.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    let mut letters = line.chars().peekable();
    while let Some(letter) = letters.next() {
        match (quote, letter) {
            (Some(end), _) if letter == end => quote = None,
            (None, '\'' | '"') => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            (Some('"') | None, '\\') => word.get_or_insert_default().extend(letters.next()),
            (None, '#') if word.is_none() => break,
            (None, ' ' | '\t') => words.extend(word.take()),
            (None, '|' | '>' | ';' | '&' | ')') => {
                words.extend(word.take());
                words.push(letter.to_string());
            }
            _ => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    words
}

/// Returns the arguments of each call of the program in a line. The first argument is the name of the program.
fn calls(line: &str) -> Vec<Vec<String>> {
    let is_operator = |word: &String| ["|", ">", ";", "&", ")"].contains(&word.as_str());
    let parts = words(line);
    let parts = parts.split(is_operator).filter_map(|part| {
        let own = part.iter().position(|word| word == "ottava" || word.ends_with("$(ottava")).filter(|at| {
            // A package or a folder with the name of the program is not a call.
            part[..*at].iter().all(|word| !["cargo", "cd", "rm"].contains(&word.as_str()))
        });
        let cargo = part.windows(2).position(|pair| pair == ["cargo", "run"]);
        let cargo = cargo.and_then(|at| Some(at + part[at..].iter().position(|word| word == "--")?));
        own.or(cargo).map(|at| [vec!["ottava".to_string()], part[at + 1..].to_vec()].concat())
    });
    parts.collect()
}

/// Returns what is wrong with a call. If the call is not a `whole` command, required arguments may be missing.
fn problem(call: &[String], whole: bool) -> Option<String> {
    let settings = call.windows(2).filter(|pair| pair[0] == "--set").map(|pair| pair[1].clone());
    for setting in settings.filter(|setting| !setting.contains('…') && *setting != "KEY=VALUE") {
        let config = root().join("configs/quickstart.toml");
        let stands_for_another = setting.split_once('=').is_some_and(|(_, value)| is_placeholder(value));
        if let Err(error) = RunConfig::load(&config, std::slice::from_ref(&setting))
            && let Some(why) = wrong_key(&error.to_string())
            && (!stands_for_another || why.contains("is not a setting"))
        {
            return Some(format!("--set {setting}: {why}"));
        }
    }
    match Cli::try_parse_from(call) {
        Ok(_) => None,
        Err(error) => match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => None,
            ErrorKind::MissingRequiredArgument | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand if !whole => None,
            ErrorKind::InvalidValue | ErrorKind::ValueValidation if matches!(error.get(ContextKind::InvalidValue), Some(ContextValue::String(value)) if is_placeholder(value)) => {
                None
            }
            _ => error.to_string().lines().next().map(str::to_string),
        },
    }
}

/// Whether `value` is a placeholder that the reader replaces, such as `NAME`.
fn is_placeholder(value: &str) -> bool {
    !value.is_empty() && value.chars().all(|letter| letter.is_ascii_uppercase())
}

/// Returns the first line of an error that is about keys or types of values. Other lines say that the run lacks something.
fn wrong_key(error: &str) -> Option<String> {
    let about_keys = ["is not a setting", "is not a table", "could be", ", expected ", "not valid TOML"];
    error.lines().find(|line| about_keys.iter().any(|words| line.contains(words))).map(str::to_string)
}

/// Returns each command of a document, from shell blocks and between backticks, and whether the command is whole.
fn commands(path: &str, text: &str) -> Vec<(String, bool)> {
    if path.ends_with(".toml") {
        let comments = text.lines().filter_map(|line| line.strip_prefix("#   "));
        return comments.map(|line| (line.to_string(), true)).collect();
    }
    let joined: Vec<String> = blocks(text, &["sh", "bash"]).iter().map(|block| block.replace("\\\n", " ")).collect();
    let lines = joined.iter().flat_map(|block| block.lines()).map(|line| (line.to_string(), true));
    let mut prose = String::new();
    for (i, part) in text.split("```").enumerate() {
        if i % 2 == 0 {
            prose += part;
        }
    }
    let quoted =
        prose.split('`').skip(1).step_by(2).map(|words| words.split_whitespace().collect::<Vec<_>>().join(" "));
    let quoted = quoted.filter(|words| words.starts_with("ottava ")).map(|words| (words, false));
    lines.chain(quoted).collect()
}

#[test]
fn every_command_in_the_documents_is_one() {
    let (mut problems, mut count) = (Vec::new(), 0);
    for (path, text) in documents() {
        for (line, whole) in commands(&path, &text) {
            for call in calls(&line) {
                count += 1;
                problems.extend(problem(&call, whole).map(|problem| format!("{path}: `{line}`: {problem}")));
            }
        }
    }
    for command in Cli::command().get_subcommands() {
        let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        for line in help.lines().filter(|line| line.starts_with("  ")) {
            for call in calls(line) {
                count += 1;
                problems.extend(
                    problem(&call, true).map(|problem| format!("help of {}: `{line}`: {problem}", command.get_name())),
                );
            }
        }
    }
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
    assert!(count > 150, "{count} commands were found");
}

#[test]
fn every_setting_in_the_documents_is_one() {
    let (folder, mut problems, mut count) = (tempfile::tempdir().unwrap(), Vec::new(), 0);
    for (path, text) in documents().iter().filter(|(path, _)| path.ends_with(".md")) {
        for block in blocks(text, &["toml"]) {
            count += 1;
            let file = folder.path().join("run.toml");
            std::fs::write(&file, block).unwrap();
            let error = RunConfig::load(&file, &[]).err().and_then(|error| wrong_key(&error.to_string()));
            problems.extend(error.map(|error| format!("{path}: {error}")));
        }
    }
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
    assert!(count > 8, "{count} blocks were found");
}

#[test]
fn wrong_commands_and_settings_are_noticed() {
    for (line, words) in [
        ("ottava train run.toml --gpu 2", "unexpected argument '--gpu'"),
        ("ottava tain run.toml", "unrecognized subcommand"),
        ("cargo run --release -- train run.toml --set recipes=bf16", "is not a setting"),
        ("FOO=1 srun ottava train run.toml --set training.max_steps=many # comment --x", "expected a whole number"),
        ("ottava bench train --gpus NN --set optimizer.nam=NAME", "is not a setting"),
        ("ottava eval model | tee log", "required"),
        ("ottava train \"my run.toml\" --resume=auto --monitor; ottava chat", "required"),
    ] {
        let found: Vec<_> = calls(line).iter().filter_map(|call| problem(call, true)).collect();
        assert!(found.len() == 1 && found[0].contains(words), "{line}: {found:?}");
    }
    assert!(calls("cd ottava && cargo build -p ottava").is_empty());
    let document = "Text `ottava plan` and `ottava\nplan x`.\n```sh\nottava train \\\n  run.toml\n```\n";
    let expected = [("ottava train    run.toml", true), ("ottava plan", false), ("ottava plan x", false)];
    assert_eq!(commands("a.md", document), expected.map(|(line, whole)| (line.to_string(), whole)));
}
