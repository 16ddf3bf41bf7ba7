//! Tests fine-tuning on chats, and talking to the model.

use crate::ranks::{children_of, signal};
use crate::setup::{Run, json};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Creates a run on four chats whose turns end with `~`.
pub fn chats() -> Run {
    let run = Run::new();
    let template = "{% for m in messages %}{{ m.role[0] + ':' + m.content + '~' }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}";
    run.write("model/chat_template.jinja", template.as_bytes());
    run.write("model/tokenizer_config.json", br#"{"eos_token": "~"}"#);
    let chat = |i: usize| {
        format!(
            r#"{{"messages": [{{"role": "user", "content": "q{i}"}}, {{"role": "assistant", "content": "{}"}}]}}"#,
            "r".repeat(1 + i)
        ) + "\n"
    };
    run.write("text.jsonl", (0..4).map(chat).collect::<String>().as_bytes());
    run.replace("run.toml", "text.txt", "text.jsonl");
    run.replace("run.toml", "val_set_size = 2", "val_set_size = 1");
    run
}

#[test]
fn chats_are_planned_trained_on_and_continued() {
    let run = chats();
    let plan = run.succeed(&["plan", "run.toml", "--details", "--show-data", "2"]);
    for part in [
        "text.jsonl: messages",
        "begin with no token of their own and end with ~ (95); generation stops at ~ (95)",
        "\nu : q",
        "~ a :[ r",
    ] {
        assert!(plan.contains(part), "no {part:?} in: {plan}");
    }
    assert!(plan.contains("packing = \"bfd\"") && plan.contains("document_mask = true"), "{plan}");
    let plan = json(&run.succeed(&["plan", "run.toml", "--show-data", "--json"]));
    assert_eq!((&plan["formattings"][0], &plan["data"]["documents"]), (&"messages".into(), &4.into()));
    assert_eq!(plan["data"]["shown"].as_array().unwrap().len(), 3);
    let trained = json(&run.succeed(&["train", "run.toml", "--json"]));
    assert!(trained["eval_loss"].as_f64().unwrap() < trained["initial_eval_loss"].as_f64().unwrap());
    let model = trained["checkpoint"].as_str().unwrap();
    let mut child = run.command(&["chat", model, "--max-new-tokens", "4"]);
    let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"q1\n\nq2\n").unwrap();
    let talk = child.wait_with_output().unwrap();
    assert!(talk.status.success());
    let answers = String::from_utf8(talk.stdout).unwrap();
    assert_eq!(answers.matches('\n').count(), 2, "an answer for each message that is not empty: {answers:?}");
    let answer = run.succeed(&["generate", model, "--chat", "--prompt", "q1", "--max-new-tokens", "4"]);
    assert!(answers.starts_with(answer.as_str()), "{answers:?} and {answer:?}");
    std::fs::remove_file(run.path("model/chat_template.jinja")).unwrap();
    run.fail(&["train", "run.toml", "--set", "output_dir=other"], 2, &["text.jsonl:1: ", "has no chat template"]);
    std::fs::remove_file(run.path(model).join("chat_template.jinja")).unwrap();
    run.fail(&["chat", model], 1, &["there is no chat template"]);
}

/// Three of the four chats are validation data. The fixed seed of the split decides which.
#[test]
fn evaluation_of_chats_gives_the_validation_loss_of_training() {
    let run = chats();
    run.replace("run.toml", "val_set_size = 1", "val_set_size = 3");
    let trained = json(&run.succeed(&["train", "run.toml", "--set", "recipe=fp32", "--json"]));
    let (expected, model) = (trained["eval_loss"].as_f64().unwrap(), trained["checkpoint"].as_str().unwrap());
    let text = std::fs::read_to_string(run.path("text.jsonl")).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let eval = |left_out: usize| {
        let name = format!("without-{left_out}.jsonl");
        let kept = lines.iter().enumerate().filter(|(i, _)| *i != left_out).map(|(_, line)| format!("{line}\n"));
        run.write(&name, kept.collect::<String>().as_bytes());
        json(&run.succeed(&["eval", model, "--data", &name, "--max-length", "16", "--device", "cpu", "--json"]))
    };
    let found: Vec<_> = (0..4).map(eval).collect();
    // Both are one mean over the same tokens in F32, so only the order of the sum could differ. Another choice of three chats has another loss.
    let near = |report: &&serde_json::Value| (report["loss"].as_f64().unwrap() - expected).abs() < 1e-6;
    assert_eq!(found.iter().filter(near).count(), 1, "{expected} and {found:?}");
    assert_eq!(
        (&found[0]["documents"], &found[0]["truncated"], &found[0]["left_out"]),
        (&3.into(), &0.into(), &0.into())
    );
    assert!(found[0].get("stride").is_none(), "{}", found[0]);
    let told = run.succeed(&["eval", model, "--data", "text.jsonl", "--max-length", "16", "--device", "cpu"]);
    assert!(told.contains("over the answers of 4 documents, each on its own"), "{told}");
    let stride = ["eval", model, "--data", "text.jsonl", "--stride", "8", "--max-length", "16", "--device", "cpu"];
    run.fail(&stride, 1, &["--stride", "is evaluated separately"]);
    let compared =
        run.succeed(&["eval", model, "--data", "text.jsonl", "--max-length", "16", "--device", "cpu", "--compare"]);
    assert!(compared.contains("over the answers of 4 documents, each on its own"), "{compared}");
    run.succeed(&["calibrate", model, "scales.json", "--data", "text.jsonl", "--max-length", "16", "--device", "cpu"]);
}

/// The file of a model suggests sampling, and flags go first.
#[test]
fn a_model_suggests_the_sampling_of_a_conversation() {
    let run = chats();
    let trained = json(&run.succeed(&["train", "run.toml", "--json"]));
    let model = trained["checkpoint"].as_str().unwrap();
    let talk = |args: &[&str]| {
        let mut child = run.command(&[&["chat", model, "--max-new-tokens", "12"][..], args].concat());
        let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(b"q1\n").unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let greedy = talk(&[]);
    run.write(&format!("{model}/generation_config.json"), br#"{"temperature": 50.0, "do_sample": true}"#);
    let drawn = talk(&["--seed", "1"]);
    assert_ne!(drawn, greedy);
    assert_eq!(drawn, talk(&["--seed", "1", "--generation-config", "none", "--temperature", "50"]));
    assert_eq!(talk(&["--temperature", "0"]), greedy);
    assert_eq!(talk(&["--generation-config", "none"]), greedy);
}

#[test]
fn a_conversation_that_is_too_long_is_told_which_setting_limits_it() {
    let run = chats();
    let trained = json(&run.succeed(&["train", "run.toml", "--json"]));
    let model = trained["checkpoint"].as_str().unwrap();
    let talk = |args: &[&str]| {
        let mut child = run.command(&[&["chat", model][..], args].concat());
        let mut child = child.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        // A write error is ignored, because a command that is refused may not read its input.
        let _ = child.stdin.take().unwrap().write_all(format!("{}\n", "q".repeat(80)).as_bytes());
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    let short = talk(&["--max-length", "20"]);
    assert!(short.contains("the conversation has 85 tokens, and --max-length is 20"), "{short}");
    let long = talk(&[]);
    assert!(long.contains("the conversation has 85 tokens, and the model has 64 positions"), "{long}");
    let none = talk(&["--max-new-tokens", "0"]);
    assert!(none.contains("expected a number of at least 1"), "{none}");
}

#[test]
fn commands_clear_and_save_a_conversation_and_old_turns_are_left_out() {
    let run = chats();
    let trained = json(&run.succeed(&["train", "run.toml", "--json"]));
    let model = trained["checkpoint"].as_str().unwrap();
    let talk = |lines: &str, args: &[&str]| {
        let mut child = run.command(&[&["chat", model, "--max-new-tokens", "2"][..], args].concat());
        let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        let (said, told) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        assert!(output.status.success(), "{told}");
        (said, told)
    };
    let (said, told) = talk("q1\n/save saved.jsonl\n/clear\nq2\n/save saved.jsonl\n/purple\n", &["--system", "s"]);
    assert_eq!(said.lines().count(), 2, "{said:?}");
    assert!(told.contains("unknown command /purple; /help lists the commands"), "{told}");
    let saved = std::fs::read_to_string(run.path("saved.jsonl")).unwrap();
    let saved: Vec<serde_json::Value> = saved.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let roles = |chat: &serde_json::Value| {
        chat["messages"].as_array().unwrap().iter().map(|m| m["role"].as_str().unwrap().to_string()).collect::<Vec<_>>()
    };
    assert_eq!(
        (roles(&saved[0]), roles(&saved[1])),
        (["system", "user", "assistant"].map(String::from).to_vec(), roles(&saved[0]))
    );
    assert_eq!(saved[1]["messages"][1]["content"], "q2", "the system message stays");
    run.replace("run.toml", "text.jsonl", "saved.jsonl");
    run.succeed(&["prepare", "run.toml"]);
    let (said, told) = talk(&"a longer question\n".repeat(3), &["--max-length", "50"]);
    assert_eq!(said.lines().count(), 3, "{said:?}");
    assert!(told.contains("longer than 50 tokens; its oldest 2 messages are left out"), "{told}");
}

/// A terminal, and what was shown on it.
struct Terminal {
    master: File,
    shown: Arc<Mutex<String>>,
}

impl Terminal {
    /// Starts `command` on a terminal.
    fn start(mut command: Command) -> (Terminal, Child) {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let path = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
        let open = || Stdio::from(File::options().read(true).write(true).open(&path).unwrap());
        let child = command.stdin(open()).stdout(open()).stderr(open()).env("TERM", "xterm").spawn().unwrap();
        let (master, shown) = (File::from(master), Arc::<Mutex<String>>::default());
        let (mut reader, of_thread) = (master.try_clone().unwrap(), shown.clone());
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = reader.read(&mut bytes) {
                of_thread.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..count]));
            }
        });
        (Terminal { master, shown }, child)
    }

    /// Waits for a prompt, and writes keys.
    fn write(&mut self, keys: &str) {
        let end = Instant::now() + Duration::from_secs(60);
        while !self.shown.lock().unwrap().contains("> ") {
            assert!(Instant::now() < end, "{}", self.shown.lock().unwrap());
            std::thread::sleep(Duration::from_millis(5));
        }
        self.shown.lock().unwrap().clear();
        self.master.write_all(keys.as_bytes()).unwrap();
        // The editor writes the line with the prompt again at each key, and the next prompt comes after the answer.
        while !self.shown.lock().unwrap().contains("\r\n") {
            assert!(Instant::now() < end, "{}", self.shown.lock().unwrap());
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut shown = self.shown.lock().unwrap();
        let end = shown.find("\r\n").expect("it was waited for");
        *shown = shown.split_off(end);
    }
}

#[test]
fn lines_are_edited_on_a_terminal_and_an_adapter_brings_its_base() {
    let run = chats();
    let base = json(&run.succeed(&["train", "run.toml", "--json"]))["checkpoint"].as_str().unwrap().to_string();
    let path = format!("model.path={base}");
    let lora = ["--set", "init=pretrained", "--set", "lora.r=2", "--set", "output_dir=adapted", "--set", "max_steps=1"];
    run.succeed(&[&["train", "run.toml", "--set", &path][..], &lora].concat());
    let (mut terminal, mut child) = Terminal::start(run.command(&["chat", "adapted", "--max-new-tokens", "1"]));
    terminal.write("qx\u{7f}1\r");
    // The arrow up recalls the message, and the arrow left moves the cursor.
    terminal.write("\u{1b}[A\u{1b}[Dz\r");
    terminal.write("\u{1b}[200~a\nb\u{1b}[201~\r");
    terminal.write("/save saved.jsonl\r");
    terminal.write("/quit\r");
    assert!(child.wait().unwrap().success());
    let saved: serde_json::Value = serde_json::from_slice(&std::fs::read(run.path("saved.jsonl")).unwrap()).unwrap();
    let users = saved["messages"].as_array().unwrap().iter().filter(|message| message["role"] == "user");
    let texts: Vec<&str> = users.map(|message| message["content"].as_str().unwrap()).collect();
    assert_eq!(texts, ["q1", "qz1", "a\nb"]);
}

/// The base model has no chat template and lacks the tokens of ChatML. The folder of the adapter has both.
#[test]
fn an_adapter_brings_its_chat_template_and_new_tokens() {
    let run = Run::new();
    let base = run.checkpoint().to_str().unwrap().to_string();
    run.fail(&["generate", &base, "--chat", "--prompt", "q1"], 1, &["there is no chat template"]);
    let chat = r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]}"#;
    run.write("chats.jsonl", [chat; 6].join("\n").as_bytes());
    let path = format!("model.path={base}");
    let settings = [
        path.as_str(),
        "init=pretrained",
        "lora.r=2",
        "tokenizer.chat_template=chatml",
        "tokenizer.pad_vocab_to_multiple_of=8",
        "tokenizer.added_special_tokens=[\"<|im_start|>\", \"<|im_end|>\"]",
        "data.train_files=[\"chats.jsonl\"]",
        "data.max_length=64",
        "output_dir=adapted",
        "max_steps=1",
    ];
    let train = |more: &[&'static str]| {
        let sets = settings.iter().chain(more).flat_map(|setting| ["--set", setting]);
        ["train", "run.toml"].into_iter().chain(sets).collect::<Vec<&str>>()
    };
    run.fail(
        &train(&[]),
        1,
        &["which are frozen beside adapters; set `lora.modules_to_save = [\"embed_tokens\", \"lm_head\"]`"],
    );
    run.succeed(&train(&["lora.modules_to_save=[\"embed_tokens\", \"lm_head\"]"]));
    let chat = |more: &[&str]| {
        run.succeed(&[&["generate"], more, &["--chat", "--prompt", "q1", "--max-new-tokens", "4"][..]].concat())
    };
    let text = chat(&[&base, "--adapter", "adapted"]);
    run.succeed(&["merge", &base, "adapted", "merged"]);
    assert_eq!(chat(&["merged", "--recipe", "fp32"]), chat(&[&base, "--adapter", "adapted", "--recipe", "fp32"]));
    assert!(!text.contains("<|im_start|>"), "{text}");
}

#[test]
fn what_a_template_does_not_read_of_chats_is_told() {
    let run = chats();
    let records = [
        r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#,
        r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "thinking": "c"}]}"#,
        r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "d", "thinking": "c"}]}"#,
        r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}"#,
    ];
    run.write("text.jsonl", records.join("\n").as_bytes());
    let output = run.ottava(&["prepare", "run.toml"]);
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{told}");
    let field =
        "chat_template.jinja does not read the field `thinking` of messages, so it is left out; 2 records have it";
    assert!(told.contains("text.jsonl:2: ") && told.contains(field), "{told}");
    assert_eq!(told.matches("thinking").count(), 1, "{told}");
    assert!(told.contains("text.jsonl:4: 1 messages of the assistant are empty, and are no targets"), "{told}");
    let tools = records[0].replace("]}", r#"], "tools": [{"name": "f"}]}"#);
    run.write("text.jsonl", [records[0], &tools].join("\n").as_bytes());
    let words = ["text.jsonl:2: ", "has `tools`", "chat_template.jinja has no place for them"];
    run.fail(&["prepare", "run.toml"], 2, &words);
}

#[test]
fn a_template_without_bounds_is_an_error_of_plan_and_train() {
    let run = chats();
    for (template, says) in [
        ("{{ [1]|batch(10**12, 0)|list }}", "more than 512 MiB of values (line 1)"),
        ("{{ 'a\nb'|indent(10**10) }}", "more than 64 MiB"),
        ("{{ '{:>9999999999}'.format(1) }}", "a width or precision of more than"),
        ("{{ 'a' * 10**10 }}", "more than 64 MiB"),
    ] {
        run.write("model/chat_template.jinja", template.as_bytes());
        run.fail(&["plan", "run.toml", "--show-data", "1"], 2, &["chat_template.jinja: ", says]);
        run.fail(&["train", "run.toml"], 2, &["text.jsonl:1: ", "chat_template.jinja: ", says]);
    }
}

#[test]
fn conversations_with_a_label_are_trained_by_kto_only() {
    let run = chats();
    let chat =
        r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "label": false}"#;
    run.write("text.jsonl", format!("{chat}\n").repeat(8).as_bytes());
    let plan = run.succeed(&["plan", "run.toml", "--details"]);
    assert!(plan.contains("kto"), "{plan}");
    run.fail(
        &["plan", "run.toml", "--set", "preference.loss_type=sigmoid"],
        1,
        &["loss_type", "completions with labels", "\"kto\""],
    );
}

/// A row has 16 tokens. The prompts of two of the six chats leave no room for their answers.
#[test]
fn chats_without_a_target_in_a_row_are_left_out_and_named() {
    let run = chats();
    let chat = |prompt: usize| {
        let (question, answer) = ("q".repeat(prompt), "r".repeat(5));
        format!(
            r#"{{"messages": [{{"role": "user", "content": "{question}"}}, {{"role": "assistant", "content": "{answer}"}}]}}"#
        ) + "\n"
    };
    run.write("text.jsonl", [1, 40, 2, 3, 60, 4].map(chat).concat().as_bytes());
    run.replace("run.toml", "val_set_size = 1", "val_set_size = 0");
    let named = "2 of 6 documents are left out, since none of their first 16 tokens predicts a token that contributes to the loss: 2, 5";
    for packing in ["bfd", "none"] {
        let packing = format!("packing={packing}");
        let plan = run.succeed(&["plan", "run.toml", "--show-data", "8", "--set", &packing]);
        assert!(plan.contains(named), "{plan}");
        let rows = plan.split("\n  Row ").skip(1).collect::<Vec<_>>();
        assert!(rows.iter().all(|row| row.contains("[ r r r r r ~]") && !row.contains("q q q q q")), "{rows:?}");
        let plan = json(&run.succeed(&["plan", "run.toml", "--show-data", "--json", "--set", &packing]));
        // Each of four rows, with 11, 12, 13 and 14 inputs, has six targets.
        assert_eq!((&plan["data"]["left_out"], &plan["data"]["target_tokens"]), (&2.into(), &24.into()));
        assert_eq!(plan["data"]["counted_tokens"], 50, "{}", plan["data"]);
        let folder = format!("output_dir={packing}");
        let output = run.ottava(&["train", "run.toml", "--set", &packing, "--set", "max_steps=5", "--set", &folder]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && error.contains(named), "{error}");
    }
    // In one stream, prompts are context of other documents. A step that has only prompts is skipped.
    let stream = ["--set", "packing=wrapped", "--set", "per_device_train_batch_size=1", "--set", "max_steps=8"];
    let output = run.ottava(&[&["train", "run.toml"][..], &stream].concat());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    assert!(error.contains("a step has no target token") && error.contains("these sequences are skipped"), "{error}");
    run.write("text.jsonl", [40, 60].map(chat).concat().as_bytes());
    run.fail(
        &["train", "run.toml", "--set", "output_dir=x"],
        2,
        &["no document has a token of an answer within `data.max_length` = 16"],
    );
}

/// No row has the end of a turn, so answers never end by themselves. With ranks, all ranks get the signal, as from a terminal.
#[test]
fn a_signal_stops_the_answer_and_not_the_program() {
    let told = [&[][..], &["--ranks", "2", "--device", "cpu"]].map(talk_with_signals);
    assert!(!told[1].contains("error"), "{}", told[1]);
}

/// Talks to the model with the options `more`, and returns the messages of the program.
fn talk_with_signals(more: &[&str]) -> String {
    let run = chats();
    run.replace("model/config.json", "embeddings\": 64", "embeddings\": 65536");
    let chat = r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "ANSWER"}]}"#;
    run.write("text.jsonl", format!("{chat}\n").replace("ANSWER", &"r".repeat(60)).repeat(4).as_bytes());
    let trained = json(&run.succeed(&["train", "run.toml", "--json"]));
    let mut command = run.command(&["chat", trained["checkpoint"].as_str().unwrap()]);
    command.args(["--max-length", "60000", "--max-new-tokens", "50000"]).args(more);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut answers = Vec::new();
    for question in ["q1\n", "q2\n"] {
        input.write_all(question.as_bytes()).unwrap();
        let mut begin = [0; 3];
        output.read_exact(&mut begin).unwrap();
        interrupt(child.id());
        let mut rest = String::new();
        output.read_line(&mut rest).unwrap();
        answers.push(String::from_utf8(begin.to_vec()).unwrap() + rest.trim_end());
    }
    input.write_all(b"/save saved.jsonl\n").unwrap();
    let saved = || std::fs::read_to_string(run.path("saved.jsonl")).unwrap_or_default();
    while !saved().ends_with('\n') {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    // Between two answers, a signal ends the program.
    interrupt(child.id());
    let ended = child.wait_with_output().unwrap();
    let told = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(130), "{told}");
    assert_eq!(told.matches("stopped; the conversation has the answer up to here").count(), 2, "{told}");
    let saved: serde_json::Value = serde_json::from_str(&saved()).unwrap();
    let content = |i: usize| saved["messages"][i]["content"].as_str().unwrap().to_string();
    assert_eq!([content(0), content(1), content(2), content(3)], ["q1", &answers[0], "q2", &answers[1]]);
    told
}

/// Sends SIGINT to a program and the ranks that it has started.
fn interrupt(pid: u32) {
    [children_of(pid), vec![pid]].concat().into_iter().for_each(|pid| signal("-INT", pid));
}
