use super::*;
use std::path::PathBuf;
use tempfile::TempDir;

/// Writes a task with these `items` and returns its path.
fn write(settings: &str, items: &str) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("task.toml");
    std::fs::write(&path, format!("name = \"t\"\ndata = \"items.jsonl\"\n{settings}")).unwrap();
    std::fs::write(folder.path().join("items.jsonl"), items).unwrap();
    (folder, path)
}

fn load(settings: &str, items: &str) -> Result<Task> {
    let (_folder, path) = write(settings, items);
    Task::load(&path)
}

fn tokenizer() -> Tokenizer {
    Tokenizer::load(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/tokenizer"))).unwrap()
}

const CHOICES: &str =
    "type = \"multiple_choice\"\nprompt = \"{{ q }}:\"\nchoices = [\"a\", \"{{ b }}\"]\nanswer = \"label\"\n";
const TEXT: &str = "type = \"generate_until\"\nprompt = \"q\"\nanswer = \"a\"\n";
const ROLLING: &str = "type = \"loglikelihood_rolling\"\nanswer = \"text\"\n";

#[test]
fn sources_are_fields_or_templates() {
    let task =
        load(CHOICES, "{\"q\": \"x\", \"b\": \"bb\", \"label\": 1}\n\n{\"q\": 2, \"b\": \"é\", \"label\": \"a\"}")
            .unwrap();
    let of = |at: usize| (task.items[at].context.as_str(), task.items[at].choices.clone(), task.items[at].gold.clone());
    assert_eq!(of(0), ("x:", vec!["a".to_string(), "bb".into()], Gold::Choices(vec![1])));
    assert_eq!(of(1), ("2:", vec!["a".to_string(), "é".into()], Gold::Choices(vec![0])));
    let listed =
        CHOICES.replace("[\"a\", \"{{ b }}\"]", "\"{{ [q, b] }}\"").replace("\"label\"", "\"{{ 1 if b else 0 }}\"");
    let task = load(&listed, "{\"q\": \"it's\", \"b\": \"y\"}").unwrap();
    assert_eq!((task.items[0].choices.join("|"), &task.items[0].gold), ("it's|y".into(), &Gold::Choices(vec![1])));
    let several = load(TEXT, "{\"q\": \"x\", \"a\": [\"1\", 2]}").unwrap();
    assert_eq!(several.items[0].gold, Gold::Texts(vec!["1".into(), "2".into()]));
}

#[test]
fn answers_are_indices_texts_or_lists_of_them() {
    let gold = |answer: &str, field: &str| {
        let settings = CHOICES.replace("\"label\"", &format!("\"{answer}\""));
        let task = load(&settings, &format!("{{\"q\": \"x\", \"b\": \"bb\", \"label\": {field}}}"));
        task.map(|task| task.items[0].gold.clone()).map_err(|error| error.to_string())
    };
    for (answer, field, right) in [
        ("label", "true", vec![1]),
        ("label", "[\"bb\", 0]", vec![1, 0]),
        ("{{ [1, 0] }}", "0", vec![1, 0]),
        ("{{ ['bb'] }}", "0", vec![1]),
        ("1", "0", vec![1]),
    ] {
        assert_eq!(gold(answer, field), Ok(Gold::Choices(right)), "{answer} {field}");
    }
    let error = gold("{{ '+1' }}", "0").unwrap_err();
    assert!(error.contains("\"+1\" is neither one of the choices nor an index below 2"), "{error}");
    let texts = load(&TEXT.replace("\"a\"", "\"{{ [a, 2] }}\""), "{\"q\": \"x\", \"a\": \"1\"}").unwrap();
    assert_eq!(texts.items[0].gold, Gold::Texts(vec!["1".into(), "2".into()]));
}

#[test]
fn a_source_is_a_field_of_all_items_or_a_template() {
    let items = "{\"q\": \"x\", \"a\": \"y\"}\n{\"q\": \"z\"}";
    let error = load(TEXT, items).err().unwrap().to_string();
    assert!(error.contains("items.jsonl, line 2: `answer`: the item has no field `a`"), "{error}");
    let error = load(&TEXT.replace("\"a\"", "\"answr\""), items).err().unwrap();
    let words = "task.toml: `answer` is \"answr\", which is neither a field of the items (`a`, `q`) nor a template";
    assert!(matches!(error, Error::Config(_)) && error.to_string().contains(words), "{error}");
    let constant = load(&TEXT.replace("\"a\"", "\"{{ \\\"answr\\\" }}\""), items).unwrap();
    assert_eq!(constant.items[1].gold, Gold::Texts(vec!["answr".into()]));
    // A choice without characters has a log-likelihood, and no log-likelihood per character.
    let empty = "{\"q\": \"x\", \"b\": \"\", \"label\": 1}";
    assert_eq!(load(&format!("{CHOICES}metrics = [\"acc\"]"), empty).unwrap().items[0].choices, ["a", ""]);
}

#[test]
fn examples_precede_each_prompt() {
    let (folder, path) = write(
        &format!("{CHOICES}num_fewshot = 2\nfewshot_data = \"few.jsonl\"\nfewshot_separator = \"##\""),
        "{\"q\": \"x\", \"b\": \"y\", \"label\": 0}",
    );
    let few = "{\"q\": \"m\", \"b\": \"n\", \"label\": 1}\n{\"q\": \"o\", \"b\": \"p\", \"label\": 0}\n";
    std::fs::write(folder.path().join("few.jsonl"), few).unwrap();
    assert_eq!(Task::load(&path).unwrap().items[0].context, "m: n##o: a##x:");
    std::fs::write(folder.path().join("few.jsonl"), &few[..few.len() / 2]).unwrap();
    let error = Task::load(&path).err().unwrap().to_string();
    assert!(error.contains("the file has 1 examples, and `num_fewshot` is 2; lower it"), "{error}");
}

#[test]
fn no_item_is_an_example_of_its_own_prompt() {
    let item = |q: &str| format!("{{\"q\": \"{q}\", \"b\": \"n\", \"label\": 0}}\n");
    let settings = format!("{CHOICES}num_fewshot = 2\nfewshot_data = \"./items.jsonl\"\nfewshot_separator = \"#\"");
    let task = load(&settings, &["x", "y", "z", "w"].map(item).concat()).unwrap();
    let contexts: Vec<_> = task.items.iter().map(|item| item.context.as_str()).collect();
    assert_eq!(contexts, ["y: a#z: a#x:", "x: a#z: a#y:", "x: a#y: a#z:", "x: a#y: a#w:"]);
    let error = load(&settings, &["x", "y"].map(item).concat()).err().unwrap().to_string();
    assert!(error.contains("has 2 examples, and `num_fewshot` is 2, and no item is an example of its own"), "{error}");
}

#[test]
fn mistakes_in_items_name_the_line() {
    for (settings, item, part) in [
        (CHOICES, "{\"q\": \"x\", \"label\": 0}", "items.jsonl, line 1: `choices`: 'b' is undefined"),
        (
            CHOICES,
            "{\"q\": \"x\", \"b\": \"y\", \"label\": 2}",
            "`answer`: 2 is neither one of the choices nor an index below 2",
        ),
        (CHOICES, "{\"q\": \"x\", \"b\": \"\", \"label\": 0}", "choice 1 is empty"),
        (TEXT, "{\"q\": null, \"a\": \"\"}", "`prompt`: null is neither a text nor a number"),
        (TEXT, "[1]", "an item is a JSON object"),
        (TEXT, "{", "this is not JSON"),
        (TEXT, "", "the file has no items"),
    ] {
        let error = load(settings, item).err().unwrap();
        assert!(matches!(error, Error::Data(_)) && error.to_string().contains(part), "{error}");
    }
    let broken = load(&TEXT.replace("\"q\"", "\"{{ q\""), "{}").err().unwrap().to_string();
    assert!(broken.contains("task.toml: `prompt` is not a Jinja template"), "{broken}");
}

#[test]
fn choices_are_scored_by_length_and_ties_take_the_first() {
    let metrics = "metrics = [\"acc\", \"acc_norm\", \"acc_bytes\"]\n";
    let items = "{\"q\": \"x\", \"b\": \"éé\", \"label\": 0}\n{\"q\": \"x\", \"b\": \"éé\", \"label\": 1}\n";
    let task = load(&format!("{CHOICES}{metrics}"), items).unwrap();
    // By characters, -3 of two is better than -2 of one; by bytes, -7 / 4 is better than -2.
    let answers = Answers::LogLikelihoods(vec![-2.0, -3.0, -2.0, -7.0]);
    let scores = task.score(&[2, 2], &answers).unwrap();
    assert_eq!(scores.metrics.iter().map(|metric| metric.value).collect::<Vec<_>>(), [0.5, 0.0, 0.5]);
    assert_eq!(scores.samples[0]["resps"], json!([-2.0, -3.0]));
    assert_eq!(scores.samples[1]["acc_bytes"], json!(1.0));
    let tie = task.score(&[2, 2], &Answers::LogLikelihoods(vec![-1.0; 4])).unwrap();
    let correct = |at: usize| tie.samples[at]["acc"].clone();
    assert_eq!((correct(0), correct(1)), (json!(1.0), json!(0.0)));
    let error = task.score(&[2, 2], &Answers::LogLikelihoods(vec![f64::NAN; 4])).unwrap_err();
    assert!(matches!(error, Error::NonFinite(_)), "{error}");
}

#[test]
fn completions_are_cut_filtered_and_compared() {
    let settings = format!(
        "{TEXT}[generation]\nuntil = [\"###\", \"\\n\"]\n[filter]\nregex_pattern = \"[0-9]+\"\ngroup_select = -1"
    );
    let items = "{\"q\": \"x\", \"a\": 7}\n{\"q\": \"x\", \"a\": [\"1\", \"9\"]}\n{\"q\": \"x\", \"a\": \"5\"}";
    let task = load(&settings, items).unwrap();
    let texts = ["1 then 7###8", "9\n4", "none"].map(String::from).to_vec();
    let scores = task.score(&[], &Answers::Texts(texts)).unwrap();
    assert_eq!(scores.metrics[0].value, 2.0 / 3.0);
    let of = |at: usize, key: &str| scores.samples[at][key].clone();
    assert_eq!((of(0, "resps"), of(0, "filtered_resps")), (json!(["1 then 7"]), json!(["7"])));
    assert_eq!((of(1, "target"), of(2, "filtered_resps")), (json!(["1", "9"]), json!(["[invalid]"])));
}

#[test]
fn texts_are_scored_in_windows_that_predict_each_token_once() {
    let task = load(ROLLING, "{\"text\": \"one two three four five six seven eight\"}").unwrap();
    let tokenizer = tokenizer();
    let ids = tokenizer.encode_prompt("one two three four five six seven eight").unwrap();
    let whole = [vec![tokenizer.prefix_id().unwrap()], ids].concat();
    let Requests::LogLikelihoods { rows, of_item } = task.requests(&tokenizer, 4).unwrap() else { panic!("a text") };
    assert_eq!(of_item, [rows.len()]);
    let mut end = 1;
    for (at, row) in rows.iter().enumerate() {
        end += row.scored;
        assert_eq!(row.tokens, whole[end.saturating_sub(5)..end], "window {at}");
    }
    assert_eq!(end, whole.len());
    let scores = task.score(&of_item, &Answers::LogLikelihoods(vec![-4.0; rows.len()])).unwrap();
    let expected = (4.0 * rows.len() as f64 / 8.0).exp();
    assert!((scores.metrics[0].value - expected).abs() < 1e-9, "{:?}", scores.metrics);
}

#[test]
fn spaces_before_a_choice_belong_to_the_choice_and_long_prompts_are_cut_at_the_left() {
    let tokenizer = tokenizer();
    let rows = |prompt: &str, delimiter: &str, max_length: usize| {
        let settings = CHOICES.replace("{{ q }}:", prompt) + &format!("target_delimiter = \"{delimiter}\"");
        let task = load(&settings, "{\"q\": \"the river\", \"b\": \"otter\", \"label\": 0}").unwrap();
        let Requests::LogLikelihoods { rows, .. } = task.requests(&tokenizer, max_length).unwrap() else {
            panic!("choices")
        };
        rows
    };
    let all = rows("{{ q }} ", "", 99);
    assert_eq!(all, rows("{{ q }}", " ", 99));
    let whole = tokenizer.encode_prompt("the river otter").unwrap();
    assert_eq!(
        (&all[1].tokens, all[1].scored),
        (&whole, whole.len() - tokenizer.encode_prompt("the river").unwrap().len())
    );
    let cut = rows("{{ q }}", " ", all[1].scored);
    assert_eq!(cut[1].tokens, whole[whole.len() - all[1].scored - 1..]);
    // A token of both texts together spans the end of the prompt. The model reads the tokens of the prompt alone.
    let (read, both) = ("the riv", "the river otter and the otter");
    let [read, both] = [read, both].map(|text| tokenizer.encode_prompt(text).unwrap());
    assert_ne!(read[..], both[..read.len()]);
    let settings = CHOICES.replace("{{ q }}:", "{{ 'the riv' }}").replace("\"a\", ", "") + "target_delimiter = \"\"";
    let task = load(&settings, "{\"b\": \"er otter and the otter\", \"label\": 0}").unwrap();
    let Requests::LogLikelihoods { rows: spanned, .. } = task.requests(&tokenizer, 99).unwrap() else {
        panic!("choices")
    };
    assert_eq!(spanned[0].tokens, [&read[..], &both[read.len()..]].concat());
    // A choice without a prompt follows the token that begins or ends a text.
    let alone = rows("", "", 99);
    assert_eq!(alone[1].tokens[0], tokenizer.prefix_id().unwrap());
    assert_eq!(alone[1].tokens[1..], tokenizer.encode("otter").unwrap());
}

#[test]
fn prompts_leave_room_for_new_tokens() {
    let tokenizer = tokenizer();
    let task =
        load(&format!("{TEXT}[generation]\nmax_gen_toks = 3"), "{\"q\": \"one two three four five\", \"a\": \"\"}")
            .unwrap();
    let whole = tokenizer.encode_prompt("one two three four five").unwrap();
    let Requests::Texts(texts) = task.requests(&tokenizer, 5).unwrap() else { panic!("texts") };
    assert_eq!(texts.prompts, [whole[whole.len() - 2..].to_vec()]);
    let error = task.requests(&tokenizer, 3).unwrap_err().to_string();
    assert!(error.contains("task t: `generation.max_gen_toks` is 3, and sequences have at most 3 tokens"), "{error}");
}
