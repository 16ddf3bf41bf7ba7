use super::*;
use ottava_recipe::param::FolderLayout;
use ottava_tensor::Device;

const LINEARS: &[&str] = &["gate_proj", "up_proj"];

fn place(matrix: AdapterMatrix, order: StackOrder, expert: usize) -> ExpertAdapter {
    ExpertAdapter { matrix, order, expert, experts: 3, linears: LINEARS, is_inner: true }
}

/// Three experts with four inputs, six outputs of two linears and the rank 2.
#[test]
fn every_order_is_stored_as_peft_reads_it_and_read_again() {
    for order in [StackOrder::OutputsFirst, StackOrder::Interleaved, StackOrder::InputsFirst] {
        for (matrix, shape) in [(AdapterMatrix::A, [2, 4]), (AdapterMatrix::B, [6, 2])] {
            let [rows, columns] = shape;
            let values: Vec<f32> = (0..3 * rows * columns).map(|i| i as f32).collect();
            let param = Tensor::from_slice(&Device::Cpu, &[3 * rows, columns], &values).unwrap();
            let all = stored(&param, place(matrix, order, 0)).unwrap();
            let tensor = |expert: usize| FolderTensor {
                name: format!("base_model.model.x.experts.{expert}.gate_up_proj.lora_A.weight"),
                shape: shape.to_vec(),
                layout: FolderLayout::ExpertAdapter(place(matrix, order, expert)),
            };
            assert_eq!(all.shape(), tensor(0).stored_shape(), "{matrix:?} {order:?}");
            let all = all.to_vec::<f32>().unwrap();
            for expert in 0..3 {
                let own = &values[expert * rows * columns..(expert + 1) * rows * columns];
                assert_eq!(of_expert(&all, &shape, &place(matrix, order, expert)), own, "{matrix:?} {order:?}");
            }
            // The first row of B in PEFT: for each rank, the values of all experts.
            if (matrix, order) == (AdapterMatrix::B, StackOrder::Interleaved) {
                assert_eq!(all[..6], [0., 12., 24., 1., 13., 25.]);
                assert_eq!(all[6], 6., "the second row is the first output of the second linear");
            }
        }
    }
}

#[test]
fn matrices_are_called_after_their_parameters() {
    let names = |targets: &[&str], names: &[&str]| -> Vec<String> {
        let targets: Vec<String> = targets.iter().map(|name| name.to_string()).collect();
        let has = |name: &str| names.contains(&name);
        names.iter().map(|name| own_name(name, &targets, has)).collect()
    };
    let [inner, outer] = ["m.mlp.experts.base_layer.lora_A.weight", "m.mlp.experts.lora_A.weight"];
    let [first, second] = ["m.mlp.experts.gate_up_proj.lora_A.weight", "m.mlp.experts.down_proj.lora_A.weight"];
    assert_eq!(names(&["gate_up_proj", "down_proj"], &[inner, outer]), [first, second]);
    assert_eq!(names(&["mlp.experts.down_proj"], &[outer]), [second]);
    assert_eq!(names(&["experts.gate_up_proj"], &[outer]), [first]);
    assert_eq!(names(&["experts.up_proj", "experts.down_proj"], &[inner])[0], "m.mlp.experts.up_proj.lora_A.weight");
    let others = ["m.mlp.experts.3.gate_proj.lora_A.weight", "m.mlp.gate.lora_A.weight", "m.norm.weight"];
    assert_eq!(names(&["gate_up_proj"], &others), others);
}

#[test]
fn matrices_of_linears_become_one_matrix() {
    let part = |rows: usize, columns: usize, first: f32| {
        let values: Vec<f32> = (0..rows * columns).map(|i| first + i as f32).collect();
        Tensor::from_slice(&Device::Cpu, &[rows, columns], &values).unwrap()
    };
    let b = of_linears(&[part(2, 1, 1.0), part(1, 2, 5.0)], &[3, 3], AdapterMatrix::B).unwrap();
    assert_eq!(b, [1., 0., 0., 2., 0., 0., 0., 5., 6.]);
    let a = of_linears(&[part(1, 2, 1.0), part(2, 2, 5.0)], &[3, 2], AdapterMatrix::A).unwrap();
    assert_eq!(a, [1., 2., 5., 6., 7., 8.]);
    assert!(of_linears(&[part(1, 2, 1.0)], &[3, 2], AdapterMatrix::A).unwrap_err().contains("[[1, 2]]"));
}
